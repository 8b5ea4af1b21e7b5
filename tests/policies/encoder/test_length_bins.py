"""The chosen bins are the best there are, and no more than are needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.formats.profile import Profile
from pliant.policies.encoder.length_bins import CLOSE, auto_lengths, choose_bins

LENGTHS = tuple(range(8, 513, 8))


def expected_s(bins: Sequence[int], seconds: dict[int, float], counts: Sequence[float]) -> float:
    return sum(count * seconds[next(end for end in bins if end >= length)] for length, count in enumerate(counts))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[float], list[int] | None, int]:
    candidates = sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=7)))
    seconds = draw(st.lists(st.floats(0.1, 10), min_size=len(candidates), max_size=len(candidates)))
    counts = st.lists(st.integers(0, 5), max_size=candidates[-1] + 1)
    return candidates, seconds, draw(st.none() | counts), draw(st.integers(1, 8))


@given(problems())
def test_fewest_bins_close_to_the_best_of_all(problem: tuple[list[int], list[float], list[int] | None, int]) -> None:
    candidates, service_s, histogram, most = problem
    *shorter, longest = candidates
    seconds = dict(zip(candidates, service_s, strict=True))
    counts = histogram if histogram and any(histogram) else [0] + [1] * longest
    best = {
        number: min(expected_s([*chosen, longest], seconds, counts) for chosen in combinations(shorter, number - 1))
        for number in range(1, min(most, len(candidates)) + 1)
    }

    bins = choose_bins(candidates, service_s, histogram, most)

    limit = (1 + CLOSE) * min(best.values())
    assert bins[-1] == longest
    assert expected_s(bins, seconds, counts) == pytest.approx(best[len(bins)])
    assert best[len(bins)] <= limit * (1 + 1e-9)
    assert all(best[number] >= limit * (1 - 1e-9) for number in range(1, len(bins)))


def test_bins_end_at_the_edges_of_a_staircase() -> None:
    noise = np.random.default_rng(0).uniform(1, 1.02, len(LENGTHS))
    service_s = (1 + np.ceil(np.array(LENGTHS) / 128)) * noise
    assert choose_bins(LENGTHS, service_s.tolist(), None, 8) == (128, 256, 384, 512)


def test_bins_go_where_the_texts_are() -> None:
    counts = np.zeros(513)
    counts[10:61] = 100
    counts[300] = 1
    bins = choose_bins(LENGTHS, LENGTHS, counts, 6)
    assert bins[-1] == 512
    assert len(bins) == 6
    assert bins[-3] <= 64


def test_one_bin_where_padding_costs_nothing() -> None:
    assert choose_bins(LENGTHS, [1.0] * len(LENGTHS), None, 8) == (512,)


@pytest.mark.parametrize(
    ("candidates", "service_s", "histogram", "most"),
    [
        ((), (), None, 1),
        ((8, 16), (1.0,), None, 1),
        ((16, 8), (1.0, 2.0), None, 1),
        ((8, 16), (1.0, 0.0), None, 1),
        ((8, 16), (1.0, 2.0), None, 0),
        ((8, 16), (1.0, 2.0), [0] * 17 + [1], 2),
        ((8, 16), (1.0, 2.0), [-1], 2),
    ],
)
def test_refuses_what_makes_no_sense(candidates, service_s, histogram, most) -> None:
    with pytest.raises(ValueError, match=r"needs|must"):
        choose_bins(candidates, service_s, histogram, most)


def profile(dynamic_s: np.ndarray, static_s: np.ndarray) -> Profile:
    return Profile(
        model="m",
        device="d",
        dtype="float32",
        threads=1,
        torch="2",
        lengths=LENGTHS,
        dynamic_s=tuple(dynamic_s),
        static_s=tuple(static_s),
        static_at=(64, 512),
        steps=(),
    )


def test_auto_lengths_follow_the_profile_and_the_texts() -> None:
    seconds = np.array(LENGTHS) / 1000
    assert auto_lengths(profile(seconds, 0.99 * seconds)) == (512,)
    faster = profile(seconds + 0.1, seconds)
    even = auto_lengths(faster)
    assert 4 <= len(even) <= 8
    assert auto_lengths(faster, most=2) == (256, 512)
    assert auto_lengths(faster, np.bincount([20, 20, 30])) == (24, 32, 512)
