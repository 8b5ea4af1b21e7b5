"""The split of a budget against brute force: every number of replicas, every choice, every way to place them."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pliant.policies.cluster import placement
from pliant.policies.cluster.budget import BudgetError, Claim, Group, Nodes, Shape, alone, gain_of
from pliant.policies.cluster.placement import first_fit, patterns, split_on
from pliant.policies.cluster.program import solve, split_total, worth_of_gpus

SHAPES = [Shape(1, 1), Shape(2, 1), Shape(0.5, 1), Shape(0.3), Shape(0, 2), Shape(1, 3), Shape(3)]


@st.composite
def claims(draw: st.DrawFn, name: str) -> Claim:
    most = draw(st.integers(0, 3))
    return Claim(
        name,
        draw(st.sampled_from(SHAPES)),
        draw(st.integers(0, min(most, 1))),
        most,
        draw(st.integers(0, 3)),
        draw(st.sampled_from([0.0, 1.5])),
        draw(st.sampled_from([0.0, 0.7])),
    )


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    groups = []
    for at in range(draw(st.integers(1, 3))):
        members = tuple(draw(claims(f"{at}-{member}")) for member in range(draw(st.integers(1, 2)) if at < 2 else 1))
        gain = st.integers(0, 20).map(float)
        alternatives = tuple(
            tuple(np.array([draw(gain) for _ in range(claim.most + 1)]) for claim in members)
            for _ in range(draw(st.integers(1, 2)))
        )
        groups.append(Group(members, alternatives))
    return groups


node_lists = st.lists(
    st.builds(Nodes, st.integers(1, 2), st.integers(0, 3), st.sampled_from([0.0, 2.0, 6.0])), min_size=1, max_size=2
)


def fits(replicas: list[Shape], nodes: list[Nodes]) -> bool:
    """By trying every place for every replica."""
    free = [([Fraction(1)] * kind.gpus, kind.cpus) for kind in nodes for _ in range(kind.count)]

    def place(at: int) -> bool:
        if at == len(replicas):
            return True
        shape, share = replicas[at], replicas[at].share
        for node, (gpus, cpus) in enumerate(free):
            if cpus < shape.cpus:
                continue
            if share >= 1:
                whole = [gpu for gpu in gpus if gpu == 1]
                if len(whole) < share:
                    continue
                options = [sorted([*(gpu for gpu in gpus if gpu < 1), *whole[int(share) :]])]
            elif share:
                options = [
                    sorted([*gpus[:each], *gpus[each + 1 :], gpus[each] - share])
                    for each in range(len(gpus))
                    if gpus[each] >= share and gpus[each] not in gpus[:each]
                ]
            else:
                options = [gpus]
            for left in options:
                free[node] = (left, cpus - shape.cpus)
                if place(at + 1):
                    return True
                free[node] = (gpus, cpus)
        return False

    return place(0)


def brute_force(groups: list[Group], nodes: list[Nodes], reserve: int) -> float:
    """The most that any split gains which fits; minus infinity where none does."""
    every = [claim for group in groups for claim in group.claims]
    splits = []
    for counts in product(*(range(claim.least, claim.most + 1) for claim in every)):
        replicas = {claim.name: count for claim, count in zip(every, counts, strict=True)}
        for choices in product(*(range(len(group.alternatives)) for group in groups)):
            splits.append((gain_of(groups, replicas, choices), counts))
    for gain, counts in sorted(splits, reverse=True):
        wanted = [claim.shape for claim, count in zip(every, counts, strict=True) for _ in range(count)]
        if fits(sorted([*wanted, *[Shape(1)] * reserve], reverse=True), nodes):
            return gain
    return -math.inf


@given(group_lists(), node_lists, st.integers(0, 1))
@settings(max_examples=150, deadline=None)
def test_equals_brute_force(groups: list[Group], nodes: list[Nodes], reserve: int) -> None:
    best = brute_force(groups, nodes, reserve)
    if best == -math.inf:
        with pytest.raises(BudgetError):
            solve(groups, nodes, reserve)
        return
    split = solve(groups, nodes, reserve)
    assert split.gain == pytest.approx(best, rel=2e-4, abs=1e-6)
    assert split.bound >= best - 1e-6
    assert split.gain == pytest.approx(gain_of(groups, split.replicas, split.choices))
    wanted = [claim.shape for group in groups for claim in group.claims for _ in range(split.replicas[claim.name])]
    assert fits(sorted([*wanted, *[Shape(1)] * reserve], reverse=True), nodes)


@given(group_lists(), node_lists)
@settings(max_examples=80, deadline=None)
def test_what_first_fit_places_is_what_the_integer_program_finds(groups: list[Group], nodes: list[Nodes]) -> None:
    try:
        split = solve(groups, nodes)
    except BudgetError:
        assume(False)
    assert split_on(groups, nodes, 0, math.inf).gain == pytest.approx(split.gain, rel=2e-4, abs=1e-6)


@given(group_lists(), node_lists, st.integers(0, 1))
@settings(max_examples=80, deadline=None)
def test_where_the_solver_has_no_time_what_is_left_out_is_what_earns_least(
    groups: list[Group], nodes: list[Nodes], reserve: int
) -> None:
    """A busy machine has SCIP end before it has found anything, which says nothing of how much room there is."""
    best = brute_force(groups, nodes, reserve)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement._Program, "solve", lambda _self: _raise(placement.UnsolvedError()))
        try:
            split = solve(groups, nodes, reserve)
        except BudgetError:  # what a first fit does not place may have room nevertheless
            return
    assert split.gain <= best + 1e-6 <= split.bound + 2e-6
    assert split.gain == pytest.approx(gain_of(groups, split.replicas, split.choices))
    for group in groups:
        assert all(claim.least <= split.replicas[claim.name] <= claim.most for claim in group.claims)
    wanted = [claim.shape for group in groups for claim in group.claims for _ in range(split.replicas[claim.name])]
    assert fits(sorted([*wanted, *[Shape(1)] * reserve], reverse=True), nodes)


def _raise(error: Exception) -> None:
    raise error


def test_what_earns_least_for_what_it_takes_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement._Program, "solve", lambda _self: _raise(placement.UnsolvedError()))
    dear = alone(Claim("dear", Shape(3), 0, 4), [0, 9, 18, 27, 36])
    cheap = alone(Claim("cheap", Shape(1), 0, 4), [0, 2, 4, 6, 8])
    assert solve([dear, cheap], [Nodes(2, 4)]).replicas == {"dear": 2, "cheap": 2}
    beside = alone(Claim("beside", Shape(0, 4), 0, 9), np.arange(10.0))
    assert solve([alone(Claim("one", Shape(1, 1), 0, 2), [0, 5, 10]), beside], [Nodes(1, 2, 10)]).replicas == {
        "one": 2,
        "beside": 2,
    }


@given(group_lists(), st.integers(0, 6))
@settings(max_examples=80, deadline=None)
def test_more_gpus_never_gain_less(groups: list[Group], gpus: int) -> None:
    worth = worth_of_gpus(groups, gpus)
    assert len(worth) == gpus + 1
    assert (np.diff(worth[worth > -np.inf]) >= 0).all()
    if worth[-1] > -np.inf:
        assert split_total(groups, gpus).gain == pytest.approx(worth[-1])


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 3)), max_size=4), node_lists)
@settings(max_examples=100, deadline=None)
def test_first_fit_is_never_wrong_when_it_says_yes(wanted: list[tuple[Shape, int]], nodes: list[Nodes]) -> None:
    if first_fit(wanted, nodes):
        assert fits(sorted((shape for shape, count in wanted for _ in range(count)), reverse=True), nodes)


def test_gangs_do_not_span_nodes() -> None:
    groups = [alone(Claim("large", Shape(3), 0, 3), [0, 1, 2, 3]), alone(Claim("small", Shape(1), 0, 2), [0, 0.1, 0.2])]
    assert solve(groups, [Nodes(2, 4)]).replicas == {"large": 2, "small": 2}
    assert solve(groups, [Nodes(4, 2)]).replicas == {"large": 0, "small": 2}


def test_a_reserve_stays_free_and_starts_cost() -> None:
    claim = Claim("chat", Shape(1), 0, 4, running=1, start_cost=1.0)
    assert solve([alone(claim, [0, 3, 5, 6.5, 7])], [Nodes(1, 4)]).replicas == {"chat": 3}
    assert solve([alone(claim, [0, 3, 5, 6.5, 7])], [Nodes(1, 4)], reserve=2).replicas == {"chat": 2}


def test_patterns_share_gpus() -> None:
    assert set(patterns(2, 9, (Shape(0.6), Shape(0.3), Shape(1)))) == {
        (2, 2, 0), (1, 4, 0), (0, 6, 0), (1, 1, 1), (0, 3, 1), (0, 0, 2)
    }  # fmt: skip


def test_the_least_that_do_not_fit_are_named() -> None:
    with pytest.raises(BudgetError, match="need more than 2 GPUs"):
        solve([alone(Claim("chat", Shape(1), 3, 3), [0, 0, 0, 1])], [Nodes(1, 2)])
    with pytest.raises(BudgetError, match="no room"):
        solve([alone(Claim("chat", Shape(2), 1, 1), [0, 1])], [Nodes(2, 1)])
