"""Labelled texts like live ones: as many as there are of the same sorts, and no more of one sort than live."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.resemblance import EDGES, LEAST, RARE, alike, degree

sure = st.lists(st.floats(0, 1), min_size=1, max_size=200)
lives = st.dictionaries(st.integers(0, len(EDGES)), st.integers(0, 500), max_size=len(EDGES) + 1)


def groups(labelled: Counter[int]) -> list[set[int]]:
    """Degrees that are taken together: those with few texts next to each other, and each other one by itself."""
    runs = groupby(range(len(EDGES) + 1), key=lambda each: -1 if labelled[each] < LEAST else each)
    return [set(run) for _, run in runs]


@given(sure=sure, live=lives)
def test_they_have_the_shares_of_live_texts_and_one_sort_is_used_up(sure: list[float], live: dict[int, int]) -> None:
    rows = alike(sure, live).tolist()
    assert rows == sorted(set(rows))
    degrees = [degree(each) for each in sure]
    total = sum(live.values())
    if not total:
        assert rows == list(range(len(sure)))
        return
    had, labelled = Counter(degrees[row] for row in rows), Counter(degrees)
    used_up = False
    for group in groups(labelled):
        share = sum(live.get(each, 0) for each in group) / total
        taken, there = (sum(of[each] for each in group) for of in (had, labelled))
        others = [row for row in range(len(sure)) if degrees[row] in group]
        assert [row for row in rows if degrees[row] in group] == others[:taken], "the first ones"
        assert taken <= share * (len(rows) / (1 - len(EDGES) * RARE) + len(EDGES) + 1)
        if share >= RARE:
            assert taken >= share * len(rows) - 1
            used_up |= taken == there
    assert used_up


def test_without_a_shift_all_are_alike_and_with_one_those_of_a_sort() -> None:
    sure = np.tile([0.4, 0.85, 0.97, 0.995], 100)
    same = {degree(each): 1000 for each in (0.4, 0.85, 0.97, 0.995)}
    assert alike(sure, same).tolist() == list(range(400))
    harder = alike(sure, same | {degree(0.4): 3000})
    assert Counter(sure[harder]) == {0.4: 100, 0.85: 33, 0.97: 33, 0.995: 33}
    assert set(sure[alike(sure, {degree(0.85): 7})]) == {0.85}


def test_a_sort_that_hardly_anybody_has_labelled_leaves_few_or_none_unless_it_is_rare() -> None:
    sure = np.repeat([0.4, 0.995], [5, 1995])
    mostly_hard = {degree(0.4): 750, degree(0.995): 250}
    assert Counter(sure[alike(sure, mostly_hard)]) == {0.4: 5, 0.995: 1}
    easy = np.full(2000, 0.995)
    assert not len(alike(easy, {degree(0.85): 10, degree(0.995): 990}))
    assert len(alike(easy, {degree(0.85): 9, degree(0.995): 991})) == 2000


@pytest.mark.parametrize(("sure", "found"), [(0.0, 0), (0.3, 1), (0.94, 6), (0.99, 9), (1.0, 9)])
def test_degrees_lie_between_the_edges(sure: float, found: int) -> None:
    assert degree(sure) == found
