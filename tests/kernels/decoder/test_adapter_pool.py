"""The pool keeps every blob as it was placed, whatever comes, goes and grows, as long as the sum of all fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from pliant.kernels.decoder import adapter_pool
from pliant.kernels.decoder.adapter_pool import ALIGNED, AdapterPool, PoolError

UNIT = ALIGNED // 4
"""Values of float32."""


def pool(units: int) -> tuple[Tensor, AdapterPool]:
    arena = torch.zeros(units * UNIT)
    return arena, AdapterPool(arena)


def blob(units: float) -> Tensor:
    return torch.randn(int(units * UNIT))


def test_blobs_lie_at_the_end_of_the_smallest_gap() -> None:
    arena, ours = pool(10)
    for key, units in (("a", 3), ("b", 1), ("c", 2)):
        ours.place(key, blob(units))
    assert [ours.offset(key) // UNIT for key in "abc"] == [7, 6, 4]
    ours.remove("b")
    placed = blob(0.5)
    ours.place("d", placed)
    assert ours.offset("d") == 6 * UNIT
    assert arena[6 * UNIT :][: len(placed)].equal(placed)
    assert ours.used == 6 * UNIT
    assert "b" not in ours
    assert "d" in ours


def test_blobs_slide_for_another_and_for_slots() -> None:
    arena, ours = pool(10)
    blobs = {key: blob(units) for key, units in (("a", 2), ("b", 3), ("c", 2), ("d", 3))}
    for key in "abcd":
        ours.place(key, blobs[key])
    ours.remove("a")
    ours.remove("c")
    ours.place("e", blob(4))
    ours.remove("e")
    ours.keep(4 * UNIT)
    for key in "bd":
        assert arena[ours.offset(key) :][: len(blobs[key])].equal(blobs[key])
    assert sorted(ours.offset(key) // UNIT for key in "bd") == [4, 7]


def test_no_more_blobs_slide_than_must() -> None:
    _, ours = pool(10)
    for key in ("gap", "a", "another", "b"):
        ours.place(key, blob(2))
    ours.remove("gap")
    ours.remove("another")
    ours.place("c", blob(4))
    assert [ours.offset(key) // UNIT for key in "acb"] == [8, 4, 2]


def test_blobs_that_give_way_spare_each_other() -> None:
    """The second lies in what is kept and behind it, where there is room for the first."""
    arena, ours = pool(14)
    blobs = {key: blob(units) for key, units in (("1", 4), ("c", 3), ("2", 1), ("b", 3), ("3", 1), ("a", 2))}
    for key, placed in blobs.items():
        ours.place(key, placed)
    for gap in "123":
        ours.remove(gap)
    assert [ours.offset(key) // UNIT for key in "abc"] == [0, 3, 7]
    ours.keep(4 * UNIT)
    for key in "abc":
        assert arena[ours.offset(key) :][: len(blobs[key])].equal(blobs[key])


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    _, ours = pool(10)
    ours.place("a", blob(4))
    with pytest.raises(PoolError, match=r"112 values for slots, 64 of adapters and 0 of another .* the arena's 160"):
        ours.keep(7 * UNIT)
    ours.keep(6 * UNIT - 1)  # which ends within the unit that is next to the blob
    with pytest.raises(PoolError, match="96 values for slots, 64 of adapters and 16 of another"):
        ours.place("b", blob(0.1))
    with pytest.raises(PoolError, match="adapter a lies in the pool already, at value 96"):
        ours.place("a", blob(1))
    with pytest.raises(KeyError):
        ours.remove("b")
    with pytest.raises(KeyError):
        ours.offset("b")


def test_only_flat_tensors_of_one_dtype() -> None:
    with pytest.raises(ValueError, match=r"a multiple of 64 bytes, got \[17\] values"):
        AdapterPool(torch.zeros(17))
    for wrong in (torch.zeros(16, 2), torch.zeros(16, dtype=torch.bfloat16), torch.zeros(0)):
        with pytest.raises(ValueError, match=r"a blob is flat torch\.float32"):
            pool(10)[1].place("a", wrong)


@pytest.mark.parametrize("way", [1, 5, 8, 9])
def test_a_slide_by_less_than_a_blob_keeps_it_whole(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_pool, "_PIECE", 3 * UNIT + 1)
    arena, ours = pool(20)
    ours.place("gap", blob(way))
    placed = blob(8)
    ours.place("a", placed)
    ours.remove("gap")
    ours.keep(12 * UNIT)
    assert ours.offset("a") == 12 * UNIT
    assert arena[12 * UNIT :].equal(placed)


def test_an_arena_that_belongs_to_inference() -> None:
    with torch.inference_mode():
        arena = torch.zeros(4 * UNIT)
    ours = AdapterPool(arena)
    placed = blob(1)
    ours.place("gap", blob(1))
    ours.place("a", placed)
    ours.remove("gap")
    ours.keep(3 * UNIT)
    assert arena[3 * UNIT :].equal(placed)


def test_check_finds_contradictions() -> None:
    for spoiled in ((0, 2 * UNIT), (7 * UNIT, 11 * UNIT), (6 * UNIT, 9 * UNIT), (4 * UNIT + 1, 5 * UNIT)):
        _, ours = pool(10)
        ours.keep(UNIT)
        ours.place("a", blob(2))
        ours.place("b", blob(2))
        ours.check()
        ours._blobs["b"] = adapter_pool._Blob(*spoiled)
        with pytest.raises(PoolError):
            ours.check()


class Pool(RuleBasedStateMachine):
    """The pool beside a dictionary of what was put in."""

    @initialize(units=st.integers(1, 40), bf16=st.booleans())
    def start(self, units: int, bf16: bool) -> None:
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.unit = ALIGNED // dtype.itemsize
        self.arena = torch.zeros(units * self.unit, dtype=dtype)
        self.pool = AdapterPool(self.arena)
        self.placed: dict[str, Tensor] = {}
        self.count = 0
        self.keeps(0)

    def keeps(self, values: int) -> None:
        """The first values are the slots': nobody else may write there."""
        self.kept = values
        self.slots = self.arena[:values].normal_().clone()

    def units(self, values: int) -> int:
        return -(-values // self.unit)

    @property
    def taken(self) -> int:
        return sum(self.units(len(blob)) for blob in self.placed.values())

    @rule(values=st.integers(1, 400))
    def place(self, values: int) -> None:
        self.count += 1
        key = f"adapter {self.count}"
        blob = torch.randn(values).to(self.arena.dtype)
        fits = self.units(self.kept) + self.taken + self.units(values) <= len(self.arena) // self.unit
        try:
            self.pool.place(key, blob)
        except PoolError:
            assert not fits
        else:
            assert fits
            self.placed[key] = blob

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.placed)))
        self.pool.remove(key)
        del self.placed[key]

    @rule(share=st.floats(0, 1.1), of_the_rest=st.booleans())
    def keep(self, share: float, of_the_rest: bool) -> None:
        rest = len(self.arena) - self.taken * self.unit
        values = int(share * (rest if of_the_rest else len(self.arena)))
        fits = self.units(values) + self.taken <= len(self.arena) // self.unit
        try:
            self.pool.keep(values)
        except PoolError:
            assert not fits
        else:
            assert fits
            self.keeps(values)

    @invariant()
    def right(self) -> None:
        self.pool.check()
        assert self.arena[: self.kept].equal(self.slots)
        assert self.pool.used == self.taken * self.unit
        owner = [""] * len(self.arena)
        for key, blob in self.placed.items():
            begin = self.pool.offset(key)
            assert begin >= self.kept
            assert not begin % self.unit
            assert self.arena[begin : begin + len(blob)].equal(blob)
            assert not any(owner[begin : begin + len(blob)])
            owner[begin : begin + len(blob)] = [key] * len(blob)


Pool.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestPool = Pool.TestCase
