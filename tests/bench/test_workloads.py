"""What the request streams promise: rates, lengths, burstiness, and the same stream from the same seed."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from pliant.bench import workloads
from pliant.bench.arrivals import BURST_RATIO, BURST_S, BURST_SHARE, Recorded, Stream

SHARED = Path(__file__).parents[3] / "shared" / "data"


def constant(rate: float, seconds: int, *, bursty: bool, tilt: float = 1.0) -> Stream:
    return Stream(np.full(seconds, rate), workloads.tweet_lengths(), np.full(seconds, tilt), bursty, seed=1)


def counts(stream: Stream) -> np.ndarray:
    return np.array([len(second.seconds) for second in stream])


def test_the_same_seed_gives_the_same_stream_and_another_does_not() -> None:
    streams = [workloads.twitter(None, 200, 20, seed, bursty=True) for seed in (7, 7, 8)]
    first, again, other = ([second.seconds.tolist() for second in stream] for stream in streams)
    assert first == again != other
    assert first == [second.seconds.tolist() for second in streams[0]], "a stream can be iterated over again"


@pytest.mark.parametrize("bursty", [False, True])
def test_a_second_has_its_rate_and_its_requests_in_order(bursty: bool) -> None:
    stream = workloads.twitter(None, 300, 400, seed=1, bursty=bursty)
    assert stream.rates.mean() == pytest.approx(300)
    arrived = counts(stream)
    assert arrived.mean() == pytest.approx(300, rel=0.05)
    assert np.corrcoef(arrived, stream.rates)[0, 1] > (0.3 if bursty else 0.8)
    for number, second in enumerate(stream):
        assert (np.diff(second.seconds) >= 0).all()
        assert ((second.seconds >= number) & (second.seconds < number + 1)).all()
        assert ((second.tokens >= 1) & (second.tokens <= 512)).all()


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


def test_lengths_drift_over_minutes_not_over_seconds() -> None:
    tilts = workloads.twitter(None, 10, 3600, seed=2, bursty=True).tilts
    assert np.log(tilts).std() == pytest.approx(0.3, rel=0.5)
    assert np.abs(np.diff(np.log(tilts))).max() < 0.02


def test_varied_takes_the_stretch_that_varies_most() -> None:
    plain, varied = (workloads.twitter(None, 10, 1200, seed=4, bursty=True, varied=varied) for varied in (False, True))
    assert varied.rates.std() > plain.rates.std()
    assert varied.rates.max() > 1.8 * varied.rates.mean(), "it holds one of the trace's surges"


def test_the_holes_of_the_trace_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "twitter_trace").mkdir()
    with gzip.open(tmp_path / "twitter_trace" / "twitter_rps_days_1_3.txt.gz", "wt") as file:
        file.write("10\n20\n0\n0\n30\n")
    rates = workloads.twitter(tmp_path, 20, 6, seed=1, bursty=False).rates
    assert sorted(rates.tolist()) == pytest.approx([10, 10, 20, 20, 30, 30])
    with pytest.raises(SystemExit, match="twitter_trace"):
        workloads.twitter(tmp_path / "nothing", 20, 6, seed=1, bursty=False)


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
def test_the_recorded_trace_is_read() -> None:
    stream = workloads.twitter(SHARED, 500, 3000, seed=1, bursty=False)
    assert stream.rates.mean() == pytest.approx(500)
    assert stream.rates.min() > 0


def test_recorded_requests_come_second_by_second() -> None:
    stream = Recorded(np.array([0.0, 0.5, 1.0, 3.2]), np.array([1, 2, 3, 4]))
    assert [second.tokens.tolist() for second in stream] == [[1, 2], [3], [], [4]]
    assert list(Recorded(np.array([]), np.array([], dtype=np.int64))) == []
    for seconds, tokens in (([0.0], [1, 2]), ([1.0, 0.5], [1, 2]), ([-1.0], [1])):
        with pytest.raises(ValueError, match="arrivals"):
            Recorded(np.array(seconds), np.array(tokens))
