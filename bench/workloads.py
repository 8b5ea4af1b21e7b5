"""What clients send: real texts, drawn with a seed."""

from __future__ import annotations

import random
from pathlib import Path

from pliant.zoo import corpus

_STRETCH = 4
"""Arlo's setup (§5) recalibrates tweets, which have at most about 125 tokens, to span up to 512."""


def texts(data: Path | None, rng: random.Random) -> list[str]:
    """Distinct texts in random order: held-out paragraphs of the Python documentation, or the tweets in `data`.

    Tweets are those of `data`/tweeteval/*/*_text.txt, each repeated until it is four times as long.
    """
    if data is None:
        found = [text.text for text in corpus.held_out()]
    else:
        files = sorted(data.glob("tweeteval/*/*_text.txt"))
        if not files:
            raise SystemExit(f"{data}: holds no tweeteval/*/*_text.txt")
        tweets = dict.fromkeys(line.strip() for file in files for line in file.read_text().splitlines())
        found = [" ".join([tweet] * _STRETCH) for tweet in tweets if tweet]
    rng.shuffle(found)
    return found
