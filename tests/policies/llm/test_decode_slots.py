"""Slots: compaction against brute force, and a map that is never wrong whatever comes and goes (Flover §V-D)."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pliant.policies.llm.decode_slots import SlotError, SlotMap, SlotsFullError

Sizes = list[int | None]


def filled(sizes: Sizes, compact: bool = True) -> SlotMap[int]:
    """A map whose slot i holds request i, for all but the sizes that are None."""
    slots: SlotMap[int] = SlotMap(len(sizes), compact)
    for request in range(len(sizes)):
        slots.append(request)
    for request, size in enumerate(sizes):
        if size is None:
            slots.evict(request)
    return slots


def least(sizes: Sizes) -> tuple[int, int]:
    """The fewest tokens, then moves, after which requests are neighbours in some slots: of all ways to move."""
    live = [slot for slot, size in enumerate(sizes) if size is not None]
    costs = []
    for begin in range(len(sizes) - len(live) + 1):
        window = range(begin, begin + len(live))
        for staying in range(len(live) + 1):
            for kept in combinations(live, staying):
                if set(kept) <= set(window):
                    moved = [sizes[slot] or 0 for slot in live if slot not in kept]
                    costs.append((sum(moved), len(moved)))
    return min(costs, default=(0, 0))


@settings(max_examples=200)
@given(st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=9))
def test_compaction_moves_the_fewest_tokens(sizes: Sizes) -> None:
    slots = filled(sizes)
    moves = slots.compact(lambda request: sizes[request] or 0)
    slots.check()
    assert (sum(move.size for move in moves), len(moves)) == least(sizes)
    assert slots.count == len(slots) == sum(size is not None for size in sizes)
    assert None not in slots.window()
    for move in moves:
        assert slots.slot(move.source) == move.target  # requests are named for the slots they came from
        assert move.size == sizes[move.source]
    sources, targets = {move.source for move in moves}, {move.target for move in moves}
    assert len(sources | targets) == 2 * len(moves)
    assert slots.compact(lambda request: 1) == []


def test_the_first_window_counts() -> None:
    """As Algorithm 3 is printed, slots 0 to 2 cost everything."""
    sizes: Sizes = [5, 5, None, 1]
    assert filled(sizes).compact(lambda request: sizes[request] or 0) == [(3, 2, 1)]


def test_tokens_weigh_not_slots() -> None:
    sizes: Sizes = [1, 1, None, None, 9]
    moves = filled(sizes).compact(lambda request: sizes[request] or 0)
    assert sorted(moves) == [(0, 2, 1), (1, 3, 1)]


def test_new_requests_fill_holes_and_then_the_ends() -> None:
    slots = filled([None, 1, None, 1, None])
    assert [slots.append(request) for request in (10, 11, 12)] == [2, 4, 0]
    with pytest.raises(SlotsFullError, match="all 5 slots"):
        slots.append(13)


def test_without_compaction_the_window_spans_holes() -> None:
    slots = filled([None, 1, None, 1, None], compact=False)
    assert slots.compact(lambda request: 1) == []
    assert (slots.offset, slots.window()) == (1, [1, None, 3])


def test_a_request_has_one_slot() -> None:
    slots: SlotMap[str] = SlotMap(2)
    slots.append("a")
    with pytest.raises(ValueError, match="'a' is in slot 0 already"):
        slots.append("a")
    slots.evict("a")
    with pytest.raises(KeyError):
        slots.evict("a")
    with pytest.raises(ValueError, match="slots must be at least 1"):
        SlotMap(0)


def test_check_finds_contradictions() -> None:
    for spoil in ("_slots", "_requests", "offset"):
        slots = filled([1, 1, None])
        setattr(slots, spoil, {"_slots": {0: 0}, "_requests": [0, 0, None], "offset": 1}[spoil])
        with pytest.raises(SlotError):
            slots.check()


class Slots(RuleBasedStateMachine):
    """The map beside memory that is moved as the map says: what a slot holds is what was put there."""

    @initialize(size=st.integers(1, 8), compact=st.booleans())
    def start(self, size: int, compact: bool) -> None:
        self.slots: SlotMap[int] = SlotMap(size, compact)
        self.compacts = compact
        self.memory: list[int | None] = [None] * size
        self.sizes: dict[int, int] = {}
        self.size = size

    @property
    def live(self) -> list[int]:
        """The slots that hold something."""
        return [slot for slot, held in enumerate(self.memory) if held]

    @precondition(lambda self: len(self.sizes) < self.size)
    @rule(tokens=st.integers(0, 20))
    def append(self, tokens: int) -> None:
        request = max(self.sizes, default=0) + 1
        before = self.live
        slot = self.slots.append(request)
        assert self.memory[slot] is None
        assert not before or before[0] - 1 <= slot <= before[-1] + 1
        self.memory[slot] = request
        self.sizes[request] = tokens

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.sizes)))
        slot = self.slots.evict(request)
        assert self.memory[slot] == request
        self.memory[slot] = None
        del self.sizes[request]

    @rule()
    def compact(self) -> None:
        def size_of(request: int) -> int:
            """Asked for while the request lies where it lay: sizes may be kept by slot."""
            assert self.memory[self.slots.slot(request)] == request
            return self.sizes[request]

        moves = self.slots.compact(size_of)
        assert not {move.source for move in moves} & {move.target for move in moves}
        assert self.compacts or not moves
        for source, target, size in moves:
            request = self.memory[source]
            assert request is not None
            assert self.memory[target] is None
            assert self.sizes[request] == size
            self.memory[source], self.memory[target] = None, request
        assert self.slots.count == len(self.sizes) or not self.compacts

    @invariant()
    def right(self) -> None:
        self.slots.check()
        assert len(self.slots) == len(self.sizes) == self.size - self.slots.free
        for slot, request in enumerate(self.memory):
            assert self.slots.request(slot) == request
            assert request is None or self.slots.slot(request) == slot
        assert [request for request in self.slots.window() if request] == [held for held in self.memory if held]


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSlots = Slots.TestCase
