"""Streams of requests: burstiness, lengths, and what is recorded."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pliant.simulation.arrivals import BURST_RATIO, BURST_S, BURST_SHARE, Recorded, Stream, Thinned, tweet_lengths


def constant(rate: float, seconds: int, *, bursty: bool, tilt: float = 1.0) -> Stream:
    return Stream(np.full(seconds, rate), tweet_lengths(), np.full(seconds, tilt), bursty, seed=1)


def counts(stream: Stream) -> np.ndarray:
    return np.array([len(second.seconds) for second in stream])


def test_stable_is_poisson_and_bursty_has_the_variance_of_its_markov_chain() -> None:
    rate, seconds = 100.0, 6000
    stable, bursty = (counts(constant(rate, seconds, bursty=bursty)) for bursty in (False, True))
    assert stable.var() == pytest.approx(rate, rel=0.1)
    calm = 1 / (1 - BURST_SHARE + BURST_SHARE * BURST_RATIO)
    variance = rate**2 * BURST_SHARE * (1 - BURST_SHARE) * (calm * (BURST_RATIO - 1)) ** 2
    memory_s = BURST_S * (1 - BURST_SHARE)
    modulated = 2 * variance * memory_s * (1 - memory_s * (1 - math.exp(-1 / memory_s)))
    assert bursty.mean() == pytest.approx(rate, rel=0.03)
    assert bursty.var() == pytest.approx(rate + modulated, rel=0.15)


def test_lengths_have_the_quantiles_of_the_papers_tweets() -> None:
    tokens = np.concatenate([second.tokens for second in constant(1000, 100, bursty=False)])
    stretch = 512 / 125
    assert np.median(tokens) == pytest.approx(21 * stretch, rel=0.02)
    assert np.quantile(tokens, 0.98) == pytest.approx(72 * stretch, rel=0.02)
    assert tokens.max() == 512


def test_a_tilt_above_one_shortens_lengths() -> None:
    medians = [
        np.median(np.concatenate([second.tokens for second in constant(1000, 20, bursty=False, tilt=tilt)]))
        for tilt in (1.5, 1.0, 0.7)
    ]
    assert medians[0] < 0.9 * medians[1] < 0.9 * 0.9 * medians[2]


def test_recorded_requests_come_second_by_second() -> None:
    stream = Recorded(np.array([0.0, 0.5, 1.0, 3.2]), np.array([1, 2, 3, 4]))
    assert [second.tokens.tolist() for second in stream] == [[1, 2], [3], [], [4]]
    assert list(Recorded(np.array([]), np.array([], dtype=np.int64))) == []
    for seconds, tokens in (([0.0], [1, 2]), ([1.0, 0.5], [1, 2]), ([-1.0], [1])):
        with pytest.raises(ValueError, match="arrivals"):
            Recorded(np.array(seconds), np.array(tokens))


def test_a_thinned_stream_is_part_of_one_that_is_thinned_less() -> None:
    full = constant(400, 5, bursty=True)
    few, many = (list(Thinned(full, share)) for share in (0.2, 0.6))
    for part, whole, share in ((few, many, 1 / 3), (many, list(full), 0.6)):
        assert all(set(one.seconds) <= set(other.seconds) for one, other in zip(part, whole, strict=True))
        kept, of = (sum(len(second.seconds) for second in each) for each in (part, whole))
        assert kept == pytest.approx(share * of, rel=0.15)
    assert len(Thinned(full, 0.2)) == 5
