"""What the request streams promise: rates, lengths, burstiness, and the same stream from the same seed."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from pliant.bench import workloads
from pliant.simulation.arrivals import Stream

SHARED = Path(__file__).parents[3] / "shared" / "data"


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


def test_lengths_drift_over_minutes_not_over_seconds() -> None:
    tilts = workloads.twitter(None, 10, 3600, seed=2, bursty=True).tilts
    assert np.log(tilts).std() == pytest.approx(0.3, rel=0.5)
    assert np.abs(np.diff(np.log(tilts))).max() < 0.02


def test_texts_that_are_alike_come_together_and_over_minutes_nothing_differs() -> None:
    """The median of a tenth of a second varies; the distribution as a whole does not."""
    plain, alike = (
        np.concatenate([second.tokens for second in workloads.twitter(None, 2000, 60, 5, bursty=False, alike=alike)])
        for alike in (0.0, 0.3)
    )
    for share in (0.1, 0.5, 0.9, 0.98):
        assert np.quantile(alike, share) == pytest.approx(np.quantile(plain, share), rel=0.1)
    spells = [np.median(tokens[: len(tokens) // 200 * 200].reshape(-1, 200), axis=1) for tokens in (plain, alike)]
    assert np.std(np.log(spells[1])) > 3 * np.std(np.log(spells[0]))


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
