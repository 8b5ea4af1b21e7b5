"""Pages are given out lowest first, never page 0 nor above the limit, and those above it are freed by moves."""

from __future__ import annotations

import pytest

from pliant.deployments.llm.free_pages import FreePages
from pliant.policies.llm.decode_slots import SlotError


def test_the_lowest_is_given_out() -> None:
    pages = FreePages(3)
    assert [pages.take() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(SlotError, match="all 3 pages are taken"):
        pages.take()
    pages.give_back([3, 1])
    assert pages.take() == 1
    assert pages.free == {3}


def test_what_lies_above_a_limit_moves_below_it() -> None:
    pages = FreePages(5)
    held = [pages.take() for _ in range(5)]
    pages.give_back([2, 4])
    assert pages.resize(3, [1, 3, 5]) == [(5, 2)]
    assert pages.free == {4, 5}
    with pytest.raises(SlotError, match="all 3 pages are taken"):
        pages.take()
    assert pages.resize(5, held) == []
    assert pages.take() == 4
