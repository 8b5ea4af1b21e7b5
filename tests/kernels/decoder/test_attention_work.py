"""Each token of a step attends once to all that it should, and programs share that evenly."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pliant.kernels.decoder.attention_work import Work, of_singles, of_spans
from pliant.kernels.decoder.ragged import Span

windows = st.none() | st.integers(1, 200)


def items_of(work: Work) -> list[list[list[int]]]:
    """By program."""
    bounds = work.bounds.tolist()
    return [work.items[first:end].tolist() for first, end in pairwise(bounds)]


@given(
    lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    window=windows,
    programs=st.integers(1, 40),
    tile=st.sampled_from([16, 64]),
)
def test_texts_are_shared_evenly(lengths: list[int], window: int | None, programs: int, tile: int) -> None:
    work = of_singles(np.array(lengths, np.int32), window, programs, tile)
    shared = items_of(work)
    assert len(shared) == programs
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    for row, token, position, tokens, start, stop, split in chain.from_iterable(shared):
        assert (token, position, tokens) == (row, lengths[row], 1)
        assert start < stop
        assert bool(split) == (work.shares[row, 1] > 1)
        seen[row] += range(start, stop)
    for row, length in enumerate(lengths):
        assert seen[row] == list(range(0 if window is None else max(0, length + 1 - window), length + 1))
        first, count = work.shares[row].tolist()
        assert {item[0] for item in work.items[first : first + count].tolist()} == {row}
    tiles = [sum(-(-(stop - start) // tile) for *_, start, stop, _ in items) for items in shared]
    total = sum(-(-len(texts) // tile) for texts in seen.values())
    assert sum(tiles) == total
    assert max(tiles) == -(-total // programs)
    assert len(work.items) == len(lengths) + programs, "what a graph reads has one size"


@given(
    spans=st.lists(st.builds(Span, st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=5),
    singles=st.integers(0, 3),
    window=windows,
    most=st.integers(1, 32),
)
def test_chunks_see_all_before_them(spans: list[Span], singles: int, window: int | None, most: int) -> None:
    work, first = of_spans(singles, spans, window, most), singles
    asked = {}
    for row, token, position, tokens, start, stop, split in work.items.tolist():
        assert not split
        assert 0 < tokens <= most
        assert stop == position + tokens
        assert start == (0 if window is None else max(0, position + 1 - window))
        asked |= {token + offset: (row, position + offset) for offset in range(tokens)}
    for row, (start, tokens) in enumerate(spans, singles):
        for offset in range(tokens):
            assert asked.pop(first + offset) == (row, start + offset)
        first += tokens
    assert not asked
    assert work.bounds.tolist() == list(range(len(work.items) + 1))
