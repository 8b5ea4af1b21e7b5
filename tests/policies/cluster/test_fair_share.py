"""Tenants' shares of a replica: the bound of the Virtual Token Counter, and what one that asks for little waits for."""

from __future__ import annotations

from collections import Counter, deque
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.cluster.fair_share import FairShare

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
MOST = 16.0
"""Of one piece."""
COSTS = st.floats(0.25, MOST, allow_nan=False)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(WEIGHTS)), COSTS),
        st.just("serve"),
        st.tuples(st.just("leave"), st.integers(0, 50)),
    ),
    max_size=120,
)


class Queue:
    """Plain first in, first out for each tenant, to compare with."""

    def __init__(self) -> None:
        self.share: FairShare[int] = FairShare()
        self.waiting: dict[str, deque[tuple[int, float]]] = {tenant: deque() for tenant in WEIGHTS}
        self.served: Counter[str] = Counter()
        """Cost / weight."""
        self._numbers = count()

    def add(self, tenant: str, cost: float) -> int:
        number = next(self._numbers)
        self.share.add(number, tenant, WEIGHTS[tenant], cost)
        self.waiting[tenant].append((number, cost))
        return number

    def serve(self) -> str | None:
        found = self.share.ranked()
        if not found:
            assert not any(self.waiting.values())
            return None
        tenant = self.share.owner(found[0])
        number, cost = self.waiting[tenant].popleft()
        assert number == found[0], "a tenant's own work is served in order"
        self.share.take(number)
        self.served[tenant] += cost / WEIGHTS[tenant]  # type: ignore[assignment]
        return tenant

    def leave(self, number: int) -> None:
        waits = any(number == one for line in self.waiting.values() for one, _ in line)
        assert self.share.remove(number) == waits
        for line in self.waiting.values():
            for piece in [piece for piece in line if piece[0] == number]:
                line.remove(piece)


@given(EVENTS)
def test_what_backlogged_tenants_are_served_differs_by_the_bound_at_most(events: list[object]) -> None:
    queue = Queue()
    most = max(MOST / weight for weight in WEIGHTS.values())
    since: dict[frozenset[str], tuple[float, float]] = {}
    """Of two tenants that have had work waiting ever since: what each had been served."""
    pairs = [frozenset(pair) for pair in (("a", "b"), ("a", "c"), ("b", "c"))]
    for event in events:
        if event == "serve":
            queue.serve()
        elif isinstance(event, tuple) and event[0] == "leave":
            queue.leave(event[1])
        else:
            assert isinstance(event, tuple)
            queue.add(*event)
        for pair in pairs:
            one, other = sorted(pair)
            if not (queue.waiting[one] and queue.waiting[other]):
                since.pop(pair, None)
                continue
            begun = since.setdefault(pair, (queue.served[one], queue.served[other]))
            gap = (queue.served[one] - begun[0]) - (queue.served[other] - begun[1])
            assert abs(gap) <= 2 * most + 1e-6
        assert queue.share.contended == (sum(map(bool, queue.waiting.values())) > 1)
        assert len(queue.share) == sum(map(len, queue.waiting.values()))


@given(st.lists(st.tuples(st.sampled_from(["b", "c"]), COSTS), max_size=40), st.integers(0, 40), COSTS)
def test_one_that_comes_waits_for_one_piece_of_each_other_at_most(
    others: list[tuple[str, float]], served: int, cost: float
) -> None:
    queue = Queue()
    for tenant, theirs in others:
        queue.add(tenant, theirs)
    for _ in range(served):
        queue.serve()
    queue.add("a", cost)
    before: Counter[str | None] = Counter()
    while (served_now := queue.serve()) != "a":
        before[served_now] += 1
    assert all(pieces == 1 for pieces in before.values())


@given(EVENTS, st.sampled_from(sorted(WEIGHTS)))
@settings(max_examples=200)
def test_what_is_foretold_to_go_before_it_does(events: list[object], tenant: str) -> None:
    queue = Queue()
    for event in events:
        if event == "serve":
            queue.serve()
        elif isinstance(event, tuple) and event[0] in WEIGHTS:
            queue.add(*event)
    foretold = set(queue.share.ahead(tenant, WEIGHTS[tenant]))
    mine = queue.add(tenant, 1.0)
    order = queue.share.ranked(len(queue.share))
    before = set(order[: order.index(mine)])
    assert before <= foretold
    ties = foretold - before
    assert len(ties) <= 2, "but for one piece of each other tenant, whose turn is at the same time"


def test_nobody_saves_up_a_share() -> None:
    share: FairShare[int] = FairShare()
    for number in range(100):
        share.add(number, "busy", 1.0, 1.0)
        share.take(number)
    share.add(100, "busy", 1.0, 1.0)
    for number in range(200, 210):
        share.add(number, "idle until now", 1.0, 1.0)
    share.add(101, "busy", 1.0, 1.0)
    first = [share.owner(work) for work in share.ranked(4)]
    assert Counter(first) == {"busy": 2, "idle until now": 2}


def test_a_piece_that_cost_more_than_foreseen_is_charged_once_that_is_known() -> None:
    share: FairShare[str] = FairShare()
    for name in ("a1", "a2", "b1", "b2", "b3", "b4"):
        share.add(name, name[0], 1.0, 1.0)
    share.take("a1")
    share.charge("a", 1.0, 2.5)
    assert share.ranked(5) == ["b1", "b2", "b3", "b4", "a2"]
    share.charge("a", 1.0, -2.0)
    assert share.ranked(5) == ["b1", "b2", "a2", "b3", "b4"]


def test_own_order_is_the_kinds() -> None:
    share: FairShare[str] = FairShare()
    for name in ("a1", "a2", "a3", "b1", "b2"):
        share.add(name, name[0], 1.0, 1.0)
    ranked = share.ranked(5, own=["a3", "b2", "a1", "a2", "b1"])
    assert [name for name in ranked if name[0] == "a"] == ["a3", "a1", "a2"]
    assert [name for name in ranked if name[0] == "b"] == ["b2", "b1"]
    assert [name[0] for name in ranked[:4]] in (["b", "a", "b", "a"], ["a", "b", "a", "b"])


@pytest.mark.parametrize(("theirs", "mine", "loser"), [(10, 0, "many"), (0, 10, "few"), (3, 3, "few")])
def test_who_is_furthest_over_goes_without(theirs: int, mine: int, loser: str) -> None:
    share: FairShare[tuple[str, int]] = FairShare()
    for number in range(theirs):
        share.add(("many", number), "many", 1.0, 1.0)
    for number in range(mine):
        share.add(("few", number), "few", 1.0, 1.0)
    assert share.furthest_over("few", 1.0, 1.0) == loser
    if loser == "many":
        assert next(share.newest(loser)) == ("many", 9)


def test_counters_of_tenants_that_are_long_gone_are_forgotten() -> None:
    share: FairShare[int] = FairShare()
    for number in range(1000):
        share.add(number, f"tenant-{number}", 1.0, 1.0)
        share.take(number)
    assert len(share._counters) <= 2


@pytest.mark.parametrize(("weight", "cost"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0)])
def test_nonsense_is_refused(weight: float, cost: float) -> None:
    with pytest.raises(ValueError, match="a weight must be above 0"):
        FairShare[int]().add(1, "a", weight, cost)
