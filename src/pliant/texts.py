"""What a text classifier reads: a text, or two together, as models of paraphrase or of inference do."""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """Two texts that are read together."""

    first: str
    second: str


Text = str | Pair


def parts(text: Text) -> tuple[str, ...]:
    """A single text alone, or both of a pair."""
    return text if isinstance(text, Pair) else (text,)


def joined(given: tuple[str, ...]) -> Text:
    """The text of which `given` are the parts."""
    return given[0] if len(given) == 1 else Pair(*given)


def cut(text: Text, most: int) -> Text:
    """The first `most` characters of each part."""
    return joined(tuple(part[:most] for part in parts(text)))
