"""Labelled texts on which a cascade is profiled (Tabi §5), or exits are calibrated: read from a file or from the zoo.

No level may have learned from them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from pliant.errors import DataError
from pliant.texts import Pair, Text, parts
from pliant.training import json_lines
from pliant.zoo import corpus

ZOO = "zoo/topics"
"""The paragraphs of the Python documentation that the zoo's text classifiers have not seen in training."""
ZOO_TRAINING = "zoo/topics-training"
"""Those that they have seen."""
_ZOO = {ZOO: corpus.held_out, ZOO_TRAINING: corpus.training}
FEWEST, MOST = 200, 5000
"""Texts that are needed, and after which others are left out, as a profile would take too long."""
CALIBRATE = (100, 500)
"""The least and the most texts to calibrate on."""
_FORM = '{"text": "…", "label": "…"}, and "text_pair": "…" of models that read pairs'
_ADVICE = f"choose {ZOO}, or a file of JSON lines"


class LabelledText(NamedTuple):
    text: Text
    label: str


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    text: str
    text_pair: str | None = None
    label: str

    @property
    def whole(self) -> Text:
        return self.text if self.text_pair is None else Pair(self.text, self.text_pair)


def read(data: str, labels: Collection[str]) -> list[LabelledText]:
    """The texts, or pairs of texts, that `data` names, each once, in their order; all labels are among `labels`.

    Raises DataError that names the line if one is wrong, and if there are fewer than FEWEST.
    """
    found: dict[Text, LabelledText] = {}
    for number, item in _lines(data):
        if item.label not in labels:
            known = ", ".join(sorted(labels)[:20]) + ", …" * (len(labels) > 20)
            raise DataError(f"{data}, line {number}: got label {item.label!r}; the levels know: {known}")
        if not all(part.strip() for part in parts(item.text)):
            raise DataError(f"{data}, line {number}: the text is empty")
        if found and isinstance(item.text, Pair) != isinstance(next(iter(found)), Pair):
            raise DataError(f"{data}, line {number}: some lines have a text_pair, others none; give it to all or none")
        found.setdefault(item.text, item)
    if len(found) < FEWEST:
        raise DataError(f"{data}: has {len(found)} different texts; at least {FEWEST} are needed, better a thousand")
    return list(found.values())


def are_pairs(data: str) -> bool:
    """Whether `data` names pairs, as its first line says. Raises DataError if that cannot be read, or is wrong."""
    return data not in _ZOO and any(isinstance(item.text, Pair) for _, item in islice(_lines(data), 1))


def _lines(data: str) -> Iterator[tuple[int, LabelledText]]:
    """What `data` names, by number of the line."""
    if zoo := _ZOO.get(data):
        yield from enumerate((LabelledText(text.text, text.label) for text in zoo()), 1)
        return
    for number, line in json_lines.read(data, _Line, _FORM, _ADVICE):
        yield number, LabelledText(line.whole, line.label)


def sample(texts: Collection[LabelledText], seed: int) -> list[LabelledText]:
    """MOST of `texts` at most, in an order that says nothing of them."""
    return random.Random(seed).sample(list(texts), min(len(texts), MOST))


def split(texts: Collection[LabelledText], seed: int) -> tuple[list[LabelledText], list[LabelledText]]:
    """Texts to calibrate and texts to choose on, at random, MOST of `texts` at most.

    A temperature is one number, which a few hundred texts fix; a choice has thousands, and the fewer texts there are,
    the wider is the margin by which a promise must be kept. So a quarter calibrates, within CALIBRATE.
    """
    shuffled = sample(texts, seed)
    least, most = CALIBRATE
    few = min(most, max(least, len(shuffled) // 4))
    return shuffled[:few], shuffled[few:]
