"""Leaves out of a text the words that a small model hardly attended to, before a large model reads it (Tabi §4.2).

What goes from model to model is the text itself, because tokenizers differ. So words are found in the text and not
among the tokens: a run between white space, without the punctuation at its ends, which counts as words of its own. In
scripts that put no space between words, a word is one Chinese character or one run of Japanese kana; elsewhere (Thai,
Khmer, …) it is a whole phrase. A word is as important as the most important of the tokens that cover any of it.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from pliant.texts import Text, joined, parts

_HAN, _HIRAGANA, _KATAKANA, _LETTER, _MARK, _OTHER, _SPACE = "hikwmp "
_SPACELESS = _HAN + _HIRAGANA + _KATAKANA
_SCRIPTS = {"CJK": _HAN, "IDEOGRAPHIC": _HAN, "HIRAGANA": _HIRAGANA, "KATAKANA": _KATAKANA, "HALFWIDTH": _KATAKANA}
_WORD = re.compile(r"hm*|i[im]*|k[km]*|w[wm]*(?:p[pm]*w[wm]*)*|[pm]+")
"""A word as the kinds of its characters: what stands between letters, as in don't or 3.14, belongs to the word."""


class Span(NamedTuple):
    """A word's place in its text, in characters."""

    start: int
    end: int
    kind: str
    """The kind of its first character; see `_kind`."""


class Pruned(NamedTuple):
    """A text after pruning: `pruned` of its `words` were left out, punctuation counted too."""

    text: Text
    words: int
    pruned: int


@dataclass(frozen=True, slots=True)
class Words:
    """A text, or one of a pair, as a model has read it, word by word."""

    text: str
    spans: tuple[Span, ...]
    importance: NDArray[np.float64]
    """By word: the most attention that one of its tokens received, over the mean of all tokens of the query but special
    ones (I over μ in equation 5). Infinite for a word that the model has not read to its end, or not at all."""

    def rest(self, alpha: float) -> tuple[str, int]:
        """The text without the words all of whose tokens received at most `alpha` times the mean (equation 5), and how
        many these are.

        It is written as a person would. With an `alpha` of 0 it is the text itself; the larger it is, the fewer words
        stay, though always the most important one that is no punctuation. Raises ValueError if `alpha` is negative or
        not finite.
        """
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha must be a number from 0 up, got {alpha}")
        kept = self.importance > alpha
        if alpha == 0 or kept.all():
            return self.text, 0
        proper = [span.kind != _OTHER for span in self.spans]
        kept[np.where(proper if any(proper) else True, self.importance, -1).argmax()] = True
        stay = np.flatnonzero(kept).tolist()
        return self._joined(stay), len(kept) - len(stay)

    def _joined(self, stay: list[int]) -> str:
        pieces = [self.text[: self.spans[0].start]]
        for before, word in zip([None, *stay], stay, strict=False):
            if before is not None:
                pieces.append(self._gap(before, word))
            pieces.append(self.text[self.spans[word].start : self.spans[word].end])
        return "".join([*pieces, self.text[self.spans[-1].end :]])

    def _gap(self, before: int, after: int) -> str:
        """What separates two words once those between them are gone: punctuation stays attached as it was."""
        gaps = [self.text[self.spans[word].end : self.spans[word + 1].start] for word in range(before, after)]
        kinds = self.spans[before].kind, self.spans[after].kind
        if kinds[1] == _OTHER:
            return gaps[-1]
        if kinds[0] == _OTHER:
            return gaps[0]
        return next(filter(None, gaps), "" if set(kinds) & set(_SPACELESS) or len(gaps) == 1 else " ")


Read = tuple[Words, ...]
"""A text as a model has read it: each of its parts."""


def whole(read: Read) -> Text:
    """What has been read."""
    return joined(tuple(words.text for words in read))


def prune(read: Read, alpha: float) -> Pruned:
    """What has been read, each part without its unimportant words (`Words.rest`)."""
    texts, left_out = zip(*(words.rest(alpha) for words in read), strict=True)
    return Pruned(joined(texts), sum(len(words.spans) for words in read), sum(left_out))


def read_words(text: Text, encoding: Encoding, importance: NDArray[np.floating]) -> Read:
    """The words of each part of `text`, as the model that read `encoding` saw them.

    `importance` [len(encoding)] is what each of its tokens received. Where the encoding was truncated, give the text
    whole: the words that are not in it can never be pruned. Raises ValueError if the importance is not one finite
    number from 0 up for each token.
    """
    if importance.shape != (len(encoding),) or not (np.isfinite(importance) & (importance >= 0)).all():
        raise ValueError(
            f"importance must be {len(encoding)} finite numbers from 0 up, one a token; got shape {importance.shape}"
            + (f", least {importance.min()}, greatest {importance.max()}" if importance.size else "")
        )
    received = importance.astype(np.float64)
    text_of = np.array([-1 if text is None else text for text in encoding.sequence_ids], np.int64)
    text_of[np.array(encoding.special_tokens_mask, bool)] = -1
    mean = received[text_of >= 0].mean() if received[text_of >= 0].any() else 0.0
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    read = []
    for number, part in enumerate(parts(text)):
        spans, own = find_words(part), text_of == number
        greatest = _greatest(spans, offsets[own], received[own])
        read.append(Words(part, spans, greatest / mean if mean else np.full(len(spans), np.inf)))
    return tuple(read)


def find_words(text: str) -> tuple[Span, ...]:
    """The words of a text, in order; between them is nothing but white space."""
    kinds = "".join(map(_kind, text))
    return tuple(Span(*match.span(), kinds[match.start()].replace(_MARK, _OTHER)) for match in _WORD.finditer(kinds))


def _greatest(spans: Sequence[Span], offsets: NDArray[np.int64], received: NDArray[np.float64]) -> NDArray[np.float64]:
    """By word: the most that a token covering any of it received; infinite if no token covers its end."""
    starts, ends = np.array([span[:2] for span in spans], np.int64).reshape(-1, 2).T
    greatest = np.full(len(spans), -1.0)
    first = np.searchsorted(ends, offsets[:, 0], side="right")
    beyond = np.searchsorted(starts, offsets[:, 1], side="left")
    for step in range(max(0, (beyond - first).max(initial=0))):
        covers = first + step < beyond
        np.maximum.at(greatest, first[covers] + step, received[covers])
    unread = (greatest < 0) | (ends > offsets[:, 1].max(initial=0))
    return np.where(unread, np.inf, greatest)


@lru_cache(maxsize=1 << 14)
def _kind(character: str) -> str:
    """One of the letters of `_WORD`, or a space."""
    if character.isspace():
        return _SPACE
    category = unicodedata.category(character)[0]
    if category == "M":
        return _MARK
    if category not in "LN":
        return _OTHER
    script = re.split("[ -]", unicodedata.name(character, ""), maxsplit=1)[0]
    return _SCRIPTS.get(script, _LETTER)
