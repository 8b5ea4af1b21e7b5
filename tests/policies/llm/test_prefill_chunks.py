"""Prompts in chunks: bounds, and a rate that is learned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.llm.passes import ALONE_S
from pliant.policies.llm.prefill_chunks import CHUNK_MULTIPLE, MOST_TOKENS, PrefillBudget, chunks


@given(st.lists(st.integers(1, 100)), st.integers(0, 300))
def test_prompts_are_computed_in_order_and_whole(prompts: list[int], budget: int) -> None:
    granted = chunks(prompts, budget)
    assert sum(granted) == min(budget, sum(prompts))
    assert granted[:-1] == prompts[: len(granted)][:-1]
    assert all(0 < tokens <= needed for tokens, needed in zip(granted, prompts, strict=False))


def test_alone_a_prompt_is_cut_only_where_it_takes_long() -> None:
    fast, slow, unknown = PrefillBudget(0.05), PrefillBudget(0.05), PrefillBudget(0.05)
    fast.observe(256, 0.01, 0)
    slow.observe(256, 2, 0)
    assert fast.tokens(live=False) == MOST_TOKENS
    assert slow.tokens(live=False) == 128 * ALONE_S
    assert CHUNK_MULTIPLE < unknown.tokens(live=False) < MOST_TOKENS


def test_an_unknown_rate_begins_with_the_least() -> None:
    assert PrefillBudget(0.05).tokens(live=True) == CHUNK_MULTIPLE


@given(st.floats(1e-4, 1), st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-5, 10), st.floats(0, 10))))
def test_budgets_stay_in_bounds(stall_s: float, seen: list[tuple[int, float, float]]) -> None:
    budget = PrefillBudget(stall_s)
    for tokens, seconds, decode_s in seen:
        budget.observe(tokens, seconds, decode_s)
    tokens = budget.tokens(live=True)
    assert CHUNK_MULTIPLE <= tokens <= MOST_TOKENS
    assert tokens % CHUNK_MULTIPLE == 0


@given(st.floats(1e-3, 0.02), st.floats(1e-6, 1e-3), st.floats(0, 0.01))
def test_chunks_settle_where_they_take_what_they_may(fixed_s: float, token_s: float, decode_s: float) -> None:
    """Rounded down to multiples, no more than the bound and no less than half of it."""
    stall_s = 0.05
    budget = PrefillBudget(stall_s)
    for _ in range(200):
        tokens = budget.tokens(live=True)
        budget.observe(tokens, decode_s + fixed_s + tokens * token_s, decode_s)
    tokens = budget.tokens(live=True)
    assert fixed_s + tokens * token_s <= stall_s * 1.001 or tokens == CHUNK_MULTIPLE
    assert fixed_s + tokens * token_s >= stall_s * 0.499 or tokens == MOST_TOKENS


def test_no_stall_is_refused() -> None:
    with pytest.raises(ValueError, match="stall_s must be above 0, got 0"):
        PrefillBudget(0)
