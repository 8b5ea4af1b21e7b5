"""The even plan: every length held, evenly, and never reshuffled."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.even_plan import even_plan

lengths = st.lists(st.integers(1, 8192), min_size=1, max_size=20, unique=True)
replicas = st.integers(0, 100)


@given(lengths, replicas)
def test_even_with_the_longest_first(held: list[int], count: int) -> None:
    plan = even_plan(held, count)
    counts = Counter(plan)
    assert len(plan) == count
    assert plan[:1] == (max(held),)[:count]
    assert counts.keys() <= set(held)
    assert max(counts[length] for length in held) - min(counts[length] for length in held) <= 1


@given(lengths, replicas, replicas)
def test_more_replicas_change_no_earlier_rank(held: list[int], count: int, more: int) -> None:
    assert even_plan(held, count + more)[:count] == even_plan(held, count)


@given(lengths, replicas)
def test_neither_order_nor_repetition_matters(held: list[int], count: int) -> None:
    assert even_plan(held, count) == even_plan(sorted(held) * 2, count)


def test_few_replicas_span_the_range() -> None:
    assert even_plan(range(64, 513, 64), 9) == (512, 256, 384, 128, 448, 192, 320, 64, 512)


@pytest.mark.parametrize(("held", "count"), [([], 1), ([64], -1)])
def test_impossible_plans(held: list[int], count: int) -> None:
    with pytest.raises(ValueError, match="at least one length"):
        even_plan(held, count)
