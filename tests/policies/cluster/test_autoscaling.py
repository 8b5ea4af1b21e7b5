"""Target tracking: never outside its bounds, never without cause, and it settles."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.cluster.autoscaling import TargetTracking


class Step(NamedTuple):
    wait_s: float
    answered: int
    near_slo: int
    above_half: int
    shed: int
    started: int
    """Replicas that start (or, negative, die) before the next question; those asked for can start at most."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    answered = draw(st.sampled_from((0, 1, 30, 200)))
    above_half = draw(st.sampled_from((0, 0, 0, answered // 60, answered)))
    return Step(
        draw(st.sampled_from((0.5, 3.0, 10.0, 25.0))),
        answered,
        draw(st.sampled_from((0, above_half))),
        above_half,
        draw(st.sampled_from((0, 0, 0, 0, 2))),
        draw(st.sampled_from((-2, 0, 5, 5))),
    )


class Change(NamedTuple):
    now: float
    by: int
    before: int
    slow: bool
    """Whether 2% of at least 50 requests since the last change, 10 seconds ago or more, came near the SLO."""
    quiet: bool
    """Whether nothing was shed and less than 2% took half the SLO in a minute without a change."""
    settled: bool
    """Whether what was last added had started, or had a minute for it."""


def drive(tracking: TargetTracking, script: list[Step], least: int, most: int) -> list[Change]:
    """Follow a script; whatever is asked for, check the bounds and list the changes with what could justify them."""
    now = changed = 0.0
    running = target = tracking.desired(0.0, least)
    assert target == least
    seen: list[tuple[float, Step]] = []
    reached = True
    changes = []
    for step in script:
        now += step.wait_s
        running = min(target, max(0, running + step.started))
        tracking.observe(now, *step[1:5])
        seen.append((now, step))
        wanted = tracking.desired(now, running)
        assert least <= wanted <= most
        assert tracking.desired(now, running) == wanted, "asked twice, answered differently"
        reached = reached or running >= target
        if wanted != target:
            recent = [past for when, past in seen if when > changed]
            slow = now - changed >= 10 and any(
                sum(past.answered + past.shed for past in recent[-count:]) >= 50
                and sum(past.near_slo + past.shed for past in recent[-count:])
                >= 0.02 * sum(past.answered + past.shed for past in recent[-count:])
                for count in range(1, len(recent) + 1)
            )
            minute = [past for when, past in seen if when > now - 60]
            answered = sum(past.answered for past in minute)
            quiet = (
                now - changed >= 60
                and not any(past.shed for past in minute)
                and (sum(past.above_half for past in minute) < 0.02 * answered or not answered)
            )
            changes.append(Change(now, wanted - target, target, slow, quiet, reached or now - changed >= 60))
            target, changed, reached = wanted, now, wanted < target
    return changes


@given(st.lists(steps(), max_size=60), st.integers(1, 60), st.integers(0, 60))
def test_every_change_is_justified(script: list[Step], least: int, extra: int) -> None:
    for change in drive(TargetTracking(least, least + extra), script, least, least + extra):
        step = math.ceil(0.05 * change.before)
        if change.by > 0:
            assert change.slow
            assert change.settled
            most = least + extra - change.before
            assert min(step, most) <= change.by <= min(max(step, change.before), most)
        else:
            assert change.quiet
            assert -change.by == min(step, change.before - least)


@given(st.lists(steps(), max_size=40), st.integers(1, 10))
def test_a_fixed_number_stays(script: list[Step], count: int) -> None:
    tracking = TargetTracking(count, count)
    now = 0.0
    for step in script:
        now += step.wait_s
        tracking.observe(now, *step[1:5])
        assert tracking.desired(now, max(0, count + step.started)) == count


@pytest.mark.parametrize(("running", "first"), [(0, 2), (1, 2), (4, 4), (9, 6)])
def test_starts_from_what_runs(running: int, first: int) -> None:
    assert TargetTracking(2, 6).desired(100.0, running) == first


def test_replicas_that_are_counted_late_are_taken_over_too() -> None:
    """A successor of a tracking that died hears from the replicas one by one."""
    tracking = TargetTracking(2, 6)
    assert [tracking.desired(float(now), running) for now, running in enumerate((0, 1, 3, 5, 4, 9))] == [
        2,
        2,
        3,
        5,
        5,
        6,
    ]
    every_second(tracking, 6, 60, 6, (0, 0, 0, 0))
    assert tracking.desired(66.0, 6) == 5, "after a change, those that have yet to leave are not taken over"


def every_second(
    tracking: TargetTracking, start: int, seconds: int, running: int, report: tuple[int, int, int, int]
) -> list[int]:
    """What is desired after each of so many seconds with the same report (answered, near_slo, above_half, shed)."""
    desired = []
    for now in range(start, start + seconds):
        tracking.observe(float(now), *report)
        desired.append(tracking.desired(float(now), running))
    return desired


@pytest.mark.parametrize(
    ("report", "grows"),
    [
        ((100, 2, 50, 0), True),
        ((100, 1, 50, 0), False),
        ((98, 0, 0, 2), True),
        ((0, 0, 0, 10), True),
        ((1, 1, 1, 0), False),
        ((0, 0, 0, 0), False),
    ],
)
def test_what_is_too_slow(report: tuple[int, int, int, int], grows: bool) -> None:
    tracking = TargetTracking(2, 10)
    tracking.desired(0.0, 2)
    assert every_second(tracking, 1, 9, 2, report) == [2] * 9
    [desired] = every_second(tracking, 10, 1, 2, report)
    assert (desired > 2) == grows


@pytest.mark.parametrize(("near", "more"), [(2, 1), (10, 2), (50, 10), (100, 20)])
def test_the_step_is_the_share_that_came_near_the_slo(near: int, more: int) -> None:
    tracking = TargetTracking(20, 100)
    tracking.desired(0.0, 20)
    assert every_second(tracking, 1, 10, 20, (100, near, near, 0))[-1] == 20 + more


def test_few_requests_are_judged_over_a_longer_time() -> None:
    tracking = TargetTracking(2, 10)
    tracking.desired(0.0, 2)
    desired = every_second(tracking, 1, 55, 2, (1, 1, 1, 0))
    assert [count > 2 for count in desired].index(True) == 49


def test_growth_waits_for_the_new_replicas_and_a_fresh_window() -> None:
    tracking = TargetTracking(2, 10)
    tracking.desired(0.0, 2)
    slow = (100, 50, 90, 0)
    assert every_second(tracking, 1, 40, 2, slow) == [2] * 9 + [3] * 31
    assert every_second(tracking, 41, 11, 3, slow) == [3] * 10 + [4], "started at 41, observed until 51"
    assert every_second(tracking, 52, 60, 3, slow) == [4] * 59 + [6], "not started at all"


def test_a_node_that_dies_changes_nothing_by_itself() -> None:
    tracking = TargetTracking(2, 10)
    assert tracking.desired(0.0, 6) == 6
    assert every_second(tracking, 1, 30, 3, (100, 0, 50, 0)) == [6] * 30
    assert every_second(tracking, 31, 30, 6, (100, 0, 50, 0)) == [6] * 30


def test_idle_replicas_are_given_back_one_a_minute() -> None:
    tracking = TargetTracking(2, 10)
    assert tracking.desired(0.0, 4) == 4
    assert every_second(tracking, 1, 180, 4, (0, 0, 0, 0)) == [4] * 59 + [3] * 60 + [2] * 61


@pytest.mark.parametrize("report", [(100, 0, 2, 0), (1000, 0, 0, 1)])
def test_not_quiet(report: tuple[int, int, int, int]) -> None:
    tracking = TargetTracking(2, 10)
    tracking.desired(0.0, 4)
    assert every_second(tracking, 1, 200, 4, report) == [4] * 200


def test_one_shed_request_keeps_the_pool_for_a_minute() -> None:
    tracking = TargetTracking(2, 10)
    tracking.desired(0.0, 4)
    every_second(tracking, 1, 50, 4, (100, 0, 0, 0))
    assert every_second(tracking, 51, 1, 4, (100, 0, 0, 1)) == [4]
    assert every_second(tracking, 52, 60, 4, (100, 0, 0, 0)) == [4] * 59 + [3]


def test_load_that_was_too_much_is_not_brought_back_for_ten_minutes() -> None:
    """Two replicas were too busy with 100 answers per second; two of three would be again with 95, but not with 80."""
    tracking = TargetTracking(1, 10)
    tracking.desired(0.0, 2)
    assert every_second(tracking, 1, 10, 2, (100, 10, 50, 0))[-1] == 3
    assert every_second(tracking, 11, 300, 3, (95, 0, 0, 0)) == [3] * 300
    assert every_second(tracking, 311, 60, 3, (80, 0, 0, 0))[-1] == 2
    tracking = TargetTracking(1, 10)
    tracking.desired(0.0, 2)
    every_second(tracking, 1, 10, 2, (100, 10, 50, 0))
    desired = every_second(tracking, 11, 620, 3, (95, 0, 0, 0))
    assert desired.index(2) == 610 - 11


def serve(tracking: TargetTracking, loads: list[float], start_s: int = 5) -> list[int]:
    """A pool as a fluid queue, second by second: one replica answers 10 requests a second; the SLO is two seconds.

    A request that arrives waits for the backlog before it; replicas take `start_s` seconds to start, none to stop.
    """
    running = target = tracking.desired(0.0, 1)
    ready: dict[int, int] = {}
    backlog = 0.0
    counts = []
    for second, load in enumerate(loads, start=1):
        running += ready.pop(second, 0)
        running = min(running, target)
        backlog += load
        latency_s = 0.1 + backlog / (10 * running)
        done = min(backlog, 10.0 * running)
        backlog -= done
        answered = round(done)
        tracking.observe(float(second), answered, answered * (latency_s >= 1.9), answered * (latency_s >= 1.1), shed=0)
        wanted = tracking.desired(float(second), running)
        if wanted > target:
            ready[second + start_s] = ready.get(second + start_s, 0) + wanted - target
        target = wanted
        counts.append(target)
    return counts


@given(st.integers(20, 1000))
@settings(max_examples=30)
def test_does_not_flap_under_a_steady_load(load: int) -> None:
    """The pool holds the load, and gives away a replica that it needs back at most once in ten minutes."""
    counts = serve(TargetTracking(1, 200), [float(load)] * 5000)
    late = counts[-2400:]
    assert 10 * sum(late) >= load * len(late)
    changes = [after - before for before, after in itertools.pairwise(late) if after != before]
    assert sum(before < 0 < after for before, after in itertools.pairwise(changes)) <= 4


def test_follows_a_load_that_comes_and_goes() -> None:
    counts = serve(TargetTracking(1, 40), [20.0] * 300 + [200.0] * 1200 + [20.0] * 3000)
    assert counts[300 + 1100] >= 20
    assert counts[-1] <= 4


@pytest.mark.parametrize(("least", "most", "quiet_s"), [(0, 2, 60.0), (3, 2, 60.0), (1, 2, 0.0)])
def test_bad_settings(least: int, most: int, quiet_s: float) -> None:
    with pytest.raises(ValueError, match="needs 1 <= least <= most"):
        TargetTracking(least, most, quiet_s)


@pytest.mark.parametrize("report", [(1, 2, 2, 0), (3, 2, 1, 0), (1, -1, 0, 0), (1, 0, 0, -1)])
def test_bad_reports(report: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs 0 <= near_slo"):
        TargetTracking(1, 2).observe(0.0, *report)
