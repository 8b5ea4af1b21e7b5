"""The zoo's texts: paragraphs of the Python documentation, each labelled with the part that it is from.

Every Python carries them in `pydoc_data.topics`. A model is asked to tell the part from one paragraph, or from several
that follow each other. The texts change a little from one Python version to the next; the labels do not.
"""

import functools
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

PARTS = {
    "data model": (
        "customization attribute-access callable-types sequence-types numeric-types context-managers specialnames "
        "types objects specialattrs typesfunctions typesmethods typesmodules "
        "bltin-code-objects bltin-ellipsis-object bltin-null-object bltin-type-objects"
    ),
    "compound statements": "compound class function for if else while with try async",
    "simple statements": ("assignment augassign import assert raise return break continue del pass global nonlocal"),
    "expressions": (
        "comparisons calls binary operator-summary subscriptions dict attribute-references bitwise booleans "
        "conversions exprlists in lambda lists power shifting slicings unary await yield truth "
        "atom-literals numbers integers floating imaginary"
    ),
    "strings": "strings string-methods formatstrings",
    "containers": "typesseq typesseq-mutable typesmapping",
    "debugger": "debugger",
}
"""Part -> its topics. Topics of several parts (names, scopes, exceptions, identifiers) are left out."""

LABELS = tuple(PARTS)
"""The parts, in the order of the models' outputs."""

_MIN_WORDS = 4
_HELD_OUT_ONE_IN = 5
_UNDERLINE = re.compile(r"([*=\-~^\"])\1{3,}")


@dataclass(frozen=True)
class Text:
    """A text, its label (one of `LABELS`) and the topic that it is from."""

    text: str
    label: str
    topic: str


@functools.cache
def texts() -> tuple[Text, ...]:
    """All paragraphs in the order of the documentation, each once: a topic may repeat another's paragraphs.

    Lines are joined, headings lose their underlines, and paragraphs of fewer than four words are left out.
    """
    found: dict[str, Text] = {}
    for label, names in PARTS.items():
        for topic in names.split():
            for paragraph in topics.get(topic, "").split("\n\n"):
                text = " ".join(_UNDERLINE.sub(" ", paragraph).split())
                found.setdefault(bare_words(text), Text(text, label, topic))
    return tuple(text for words, text in found.items() if len(words.split()) >= _MIN_WORDS)


def training() -> list[Text]:
    """The paragraphs that the zoo's models may learn from: about four in five."""
    return [text for text in texts() if not _is_held_out(text)]


def held_out() -> list[Text]:
    """The paragraphs that no model of the zoo has seen in training: about one in five."""
    return [text for text in texts() if _is_held_out(text)]


def windows(paragraphs: Sequence[Text], count: int, rng: random.Random, words: tuple[int, int]) -> list[Text]:
    """`count` longer texts, each of paragraphs of one topic, in their order.

    Lengths are spread evenly over the logarithm of the range `words`, and are shorter where a topic ends early. Only
    `paragraphs` are used, so windows of the training paragraphs hold nothing that is held out.
    """
    by_topic: dict[str, list[Text]] = defaultdict(list)
    for paragraph in paragraphs:
        by_topic[paragraph.topic].append(paragraph)
    shortest, longest = words
    made = []
    for first in rng.choices(paragraphs, k=count):
        wanted = round(shortest * (longest / shortest) ** rng.random())
        following = by_topic[first.topic][by_topic[first.topic].index(first) :]
        joined = " ".join(paragraph.text for paragraph in following).split()
        made.append(Text(" ".join(joined[:wanted]), first.label, first.topic))
    return made


def bare_words(text: str) -> str:
    """The words of a text in lower case, without punctuation: what makes two texts the same."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _is_held_out(text: Text) -> bool:
    """Decided by the words alone, so that a paragraph stays on its side whatever else is in the corpus."""
    return zlib.crc32(bare_words(text.text).encode()) % _HELD_OUT_ONE_IN == 0
