"""What clients send: real texts, drawn with a seed; and Arlo's request streams, whose texts are only lengths (§5)."""

from __future__ import annotations

import gzip
import math
import random
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pliant.simulation.arrivals import Floats, Stream, tweet_lengths
from pliant.zoo import corpus

_STRETCH = 4
"""Arlo's setup (§5) recalibrates tweets, which have at most about 125 tokens, to span up to 512."""

_TRACE = "twitter_trace/twitter_rps_days_1_3.txt.gz"
_DRIFT = 0.3
"""Standard deviation of the logarithm of a stream's tilt: the median length wanders by about 15% either way."""
_DRIFT_PERIODS = (math.log(600), math.log(3600))
"""Logarithms of seconds."""
_SURGE_EVERY_S = 7200
_SURGE_S = (300, 700)
_SURGE = 3.5
_BASE_RATE = 50
_DAY_S = 86_400
_STRETCHES = 64


def texts(data: Path | None, rng: random.Random) -> list[str]:
    """Distinct texts in random order: held-out paragraphs of the Python documentation, or the tweets in `data`.

    Tweets are those of `data`/tweeteval/*/*_text.txt, each repeated until it is four times as long.
    """
    if data is None:
        found = [text.text for text in corpus.held_out()]
    else:
        found = [" ".join([tweet] * _STRETCH) for tweet in _tweets(data)]
    rng.shuffle(found)
    return found


def tweets(data: Path | None, tokenizer: Tokenizer, number: int, rng: random.Random) -> list[str]:
    """Texts as long as tweets are: those in `data`, or else paragraphs that are cut to such lengths."""
    if data is not None:
        return rng.sample(_tweets(data), number)
    wanted = np.ceil(tweet_lengths() / _STRETCH).astype(int).tolist()
    paragraphs = [text.text for text in corpus.held_out()]
    ends = [[end for _, end in encoding.offsets] for encoding in tokenizer.encode_batch(paragraphs)]
    found = []
    for length in rng.choices(wanted, k=number):
        index = rng.choice([index for index, each in enumerate(ends) if len(each) > length + 1])
        found.append(paragraphs[index][: max(1, ends[index][length])])
    return found


def twitter(
    data: Path | None,
    mean_rate: float,
    seconds: int,
    seed: int,
    *,
    bursty: bool,
    varied: bool = False,
    alike: float = 0.0,
) -> Stream:
    """Twitter-Bursty or Twitter-Stable (§5): `seconds` of a stream of `mean_rate` requests per second.

    The rate of each second follows a stretch of the trace in `data`, chosen by the seed and rescaled; without `data`,
    a made-up trace of the same shape. `varied` chooses, of many stretches, the one whose rate varies most. Lengths have
    the median, 98th percentile and longest of the paper's tweets, stretched to 512 tokens, and drift over minutes;
    within tenths of a second they are `alike` (see `Stream`).
    """
    rng = np.random.default_rng(seed)
    trace = _recorded_rates(data) if data else _synthetic_rates(rng)
    starts = rng.integers(len(trace), size=_STRETCHES if varied else 1)
    stretches = [np.take(trace, np.arange(start, start + seconds), mode="wrap") for start in starts]
    rates = max(stretches, key=lambda rates: float(rates.std() / rates.mean()))
    return Stream(rates * (mean_rate / rates.mean()), tweet_lengths(), _tilts(seconds, rng), bursty, seed, alike)


def _tweets(data: Path) -> list[str]:
    files = sorted(data.glob("tweeteval/*/*_text.txt"))
    if not files:
        raise SystemExit(f"{data}: holds no tweeteval/*/*_text.txt")
    tweets = dict.fromkeys(line.strip() for file in files for line in file.read_text().splitlines())
    return [tweet for tweet in tweets if tweet]


@cache
def _recorded_rates(data: Path) -> Floats:
    """Requests per second of the trace, without the holes in which nothing was recorded."""
    path = data / _TRACE
    if not path.exists():
        raise SystemExit(f"{data}: holds no {_TRACE}")
    with gzip.open(path, "rt") as file:
        trace = np.loadtxt(file)
    return trace[trace > 0]


def _synthetic_rates(rng: np.random.Generator) -> Floats:
    """A day of slow waves and counting noise, and surges of minutes to three times the rate, as in the trace."""
    wave = 1 + 0.3 * np.sin(2 * np.pi * np.arange(_DAY_S) / _DAY_S)
    start = rng.exponential(_SURGE_EVERY_S)
    while start < _DAY_S:
        end = start + rng.uniform(*_SURGE_S)
        wave[int(start) : int(end)] *= _SURGE
        start = end + rng.exponential(_SURGE_EVERY_S)
    return np.maximum(rng.poisson(_BASE_RATE * wave), 1).astype(np.float64)


def _tilts(seconds: int, rng: np.random.Generator) -> Floats:
    """Slow waves of random phase and period, so that the lengths drift over minutes (Figures 1 and 12)."""
    periods = np.exp(rng.uniform(*_DRIFT_PERIODS, size=4))[:, None]
    waves = np.sin(2 * np.pi * (np.arange(seconds) / periods + rng.random((4, 1))))
    tilts: Floats = np.exp(_DRIFT * math.sqrt(2 / 4) * waves.sum(axis=0))
    return tilts
