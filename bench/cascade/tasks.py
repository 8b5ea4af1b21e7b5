"""Labelled texts of public data sets and of the zoo, split honestly: what one split decides, no other one has seen.

Models learn from "train" alone, everything is chosen on "choose", and the figures come from "test".
"""

from __future__ import annotations

import csv
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pliant.errors import DataError
from pliant.texts import Pair, Text
from pliant.training.labelled_texts import LabelledText
from pliant.zoo import corpus

Texts = Sequence[LabelledText]

_SEED = 0


@dataclass(frozen=True)
class Splits:
    """The texts of one task; no two splits share any."""

    train: Texts
    choose: Texts
    test: Texts

    @property
    def labels(self) -> tuple[str, ...]:
        """In alphabetical order."""
        return tuple(sorted({text.label for text in (*self.train, *self.choose)}))

    def sizes(self) -> dict[str, int]:
        """How many texts are in each."""
        return {name: len(texts) for name, texts in vars(self).items()}


def clinc150(data: Path) -> Splits:
    """Intents of 150 kinds (out-of-scope texts are left out): its validation split chooses.

    Raises DataError if it is not there.
    """
    content = json.loads(_content(data / "clinc150" / "data_full.json"))
    train, held_out, test = ([LabelledText(*pair) for pair in content[name]] for name in ("train", "val", "test"))
    return _distinct(train, held_out, test)


def sst2(data: Path) -> Splits:
    """Sentiment of film reviews: its development split is small, so 1500 texts of those to train on choose, too.

    Raises DataError if it is not there.
    """
    train, held_out, test = (_rows(data / "sst2" / f"{name}.tsv") for name in ("train", "dev", "test"))
    taken, rest = _divide(train, 1500)
    return _distinct(rest, [*held_out, *taken], test)


def clinc150_pairs(data: Path) -> Splits:
    """Whether two texts of CLINC150 ask for the same thing, as paraphrase data sets do; half of the pairs do, and those
    that do not are of one domain. A text is in at most one pair of either kind, and in one split.

    Raises DataError if it is not there.
    """
    domains = json.loads(_content(data / "clinc150" / "domains.json"))
    domain_of = {intent: domain for domain, intents in domains.items() for intent in intents}
    return Splits(*(_pairs(texts, domain_of) for texts in vars(clinc150(data)).values()))


def topics() -> Splits:
    """The zoo's topics: what its models have not learned from, in two parts."""
    held_out = [LabelledText(text.text, text.label) for text in corpus.held_out()]
    return _distinct([], *_divide(held_out, 2 * len(held_out) // 3))


def _pairs(texts: Texts, domain_of: Mapping[str, str]) -> Texts:
    """Of texts labelled by intent."""
    same, of_one_domain = defaultdict(list), defaultdict(list)
    for text in _shuffled(texts):
        same[text.label].append(text)
        of_one_domain[domain_of[text.label]].append(text)
    found = [(one, other, "same") for one, other in _couples(same.values())]
    found += [(one, other, "different") for one, other in _couples(of_one_domain.values()) if one.label != other.label]
    return _shuffled([LabelledText(Pair(str(one.text), str(other.text)), label) for one, other, label in found])


def _couples(groups: Iterable[Texts]) -> Iterator[tuple[LabelledText, LabelledText]]:
    """Of neighbours in each group, each in one."""
    for group in groups:
        yield from zip(group[::2], group[1::2], strict=False)


def _divide(texts: Texts, first: int) -> tuple[Texts, Texts]:
    """The `first` texts, and the others, at random."""
    shuffled = _shuffled(texts)
    return shuffled[:first], shuffled[first:]


def _shuffled(texts: Texts) -> Texts:
    return random.Random(_SEED).sample(list(texts), len(texts))


def _distinct(train: Texts, choose: Texts, test: Texts) -> Splits:
    """The splits, without a text that a later one, "test" last, holds too, or that it holds twice.

    All but the one to train on, which learning shuffles itself, are shuffled: their first texts hold all labels, though
    files may be sorted by label.
    """
    known: set[Text] = set()
    kept: list[Texts] = []
    for texts in (test, choose, train):
        once = {text.text: text for text in texts if text.text not in known}
        known |= set(once)
        kept.append(list(once.values()) if texts is train else _shuffled([*once.values()]))
    return Splits(*reversed(kept))


def _rows(path: Path) -> list[LabelledText]:
    lines = csv.reader(_content(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [LabelledText(text, ("negative", "positive")[int(label)]) for text, label in lines]


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; give the folder of data sets with --data") from None
