"""What a pass may take, how long a chunk that allows, and how many pages will be in use: against brute force."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.llm.passes import (
    AGEING,
    ALONE_S,
    Due,
    Work,
    chunk,
    longest_chunk,
    pass_limit_s,
    peak_pages,
    token,
    turn,
)


class Linear:
    """A pass takes 10 ms, or by its tokens and what they attend to."""

    def pass_s(self, work: Work) -> float:
        return max(0.01, work.tokens * 1e-4) + (work.stored + work.pairs) * 1e-6 + work.adapter_tokens * 1e-9

    def prompt_s(self, tokens: int, before: int) -> float:
        return tokens * 1e-4

    def load_s(self, bytes: int) -> float:
        return bytes * 1e-9


@given(st.integers(0, 200), st.integers(1, 400), st.integers(0, 500), st.integers(0, 9), st.floats(0.0, 0.2))
def test_the_longest_chunk_is_the_longest_that_is_in_time(
    rows: int, left: int, before: int, adapter_bytes: int, limit_s: float
) -> None:
    work = Work(rows, rows * 100)
    fits = [
        tokens
        for tokens in range(1, left + 1)
        if Linear().pass_s(work.plus(chunk(tokens, before, adapter_bytes))) <= limit_s
    ]
    assert longest_chunk(Linear(), work, left, before, adapter_bytes, limit_s) == max(fits, default=0)


def test_a_chunk_attends_to_what_is_before_it_and_in_it() -> None:
    assert chunk(3, 10, 5) == Work(prompt=3, pairs=11 + 12 + 13, adapter_tokens=15)
    parts = chunk(4, 0, 1).plus(chunk(3, 4, 1))
    assert parts == chunk(7, 0, 1)
    assert token(10, 5) == Work(rows=1, stored=10, adapter_bytes=5)


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=6), st.integers(1, 8))
def test_the_peak_is_that_of_a_rehearsal(fixed: int, rows: list[tuple[int, int]], page_tokens: int) -> None:
    most = fixed + sum(pages for pages, _ in rows)
    for iteration in range(1, 41):
        live = [(pages, left) for pages, left in rows if left >= iteration]
        most = max(most, fixed + sum(pages + -(-iteration // page_tokens) for pages, _ in live) if live else 0)
    assert peak_pages(fixed, rows, page_tokens) == most


def test_a_pass_takes_what_the_strictest_answer_can_spare() -> None:
    assert pass_limit_s([], 5.0) == ALONE_S
    assert pass_limit_s([Due(math.inf, math.inf)], 5.0) == ALONE_S
    assert math.isclose(pass_limit_s([Due(5.12, 0.1), Due(9.0, 0.2)], 5.0), 0.12)
    assert math.isclose(pass_limit_s([Due(9.0, 0.1)], 5.0), 0.2), "not all that it is ahead"
    assert math.isclose(pass_limit_s([Due(4.0, 0.1)], 5.0), 0.1), "one that is late asks for its pace"


_SECONDS = st.floats(0, 100)


@given(_SECONDS, _SECONDS, _SECONDS, _SECONDS)
def test_a_prompt_is_passed_only_by_shorter_ones_that_come_within_a_while(
    prompt_s: float, arrived: float, other_s: float, later_s: float
) -> None:
    passed = turn(other_s, arrived + later_s) < turn(prompt_s, arrived)
    assert not passed or (other_s < prompt_s and later_s < prompt_s / AGEING)
    assert turn(other_s, arrived) <= turn(prompt_s, arrived) or other_s > prompt_s
    assert turn(other_s, arrived + later_s, "fifo") >= turn(prompt_s, arrived, "fifo")
