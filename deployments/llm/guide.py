"""What may come next in answers that are bound: to a grammar, or to leave words out.

A guide follows its answer token by token, so that one that is made anew from the tokens that a client has, in another
replica, goes on where the first was. Masks are computed in a thread of their own, which leaves Python's lock to others,
while the device computes the logits that they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pliant.deployments.http.grammars import limits
from pliant.deployments.llm.detokenizer import TokenBytes
from pliant.deployments.llm.request import Generation
from pliant.kernels.decoder.decode_step import RowMasks

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_ALL = np.uint32(0xFFFF_FFFF)
_END = "<|the end of an answer|>"


class GuideError(ValueError):
    """The grammar cannot be followed, or not any further."""


class Guide:
    """Which tokens may come next in one answer, of `words` times 32: those that `matcher` allows, and none that ends
    one of the `unwanted` sequences.

    `ends` are tokens that have a text and end unbound answers. Here they are text wherever the matcher allows that, and
    else end the answer where it is complete.
    """

    def __init__(
        self,
        words: int,
        matcher: LLMatcher | None,
        unwanted: Sequence[tuple[int, ...]],
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.words = words
        self.matcher = matcher
        self.ends = ends
        self._unwanted = unwanted
        self._last: list[int] = []
        self._longest = max(map(len, unwanted), default=1) - 1

    def push(self, token: int) -> bool:
        """The answer goes on with `token`; False if it ends with it, as a text that it does not belong to.

        Raises GuideError if the answer can have no such token, nor end.
        """
        if self._longest:
            self._last = [*self._last, token][-self._longest :]
        if self.matcher is None:
            return True
        ends = token in self.ends and self.matcher.is_accepting()
        if self.matcher.consume_token(token):
            return True
        if ends:
            return False
        error = self.matcher.get_error().partition("\n")[0]
        raise GuideError(
            f"with its next token it is no answer that its grammar allows ({error}): "
            "repeat and combine less in the grammar, or ban fewer tokens"
        )

    @property
    def complete(self) -> bool:
        """Whether the grammar has come to an end, and allows nothing more."""
        return self.matcher is not None and bool(self.matcher.is_stopped())

    def edit(self, mask: NDArray[np.uint32]) -> None:
        """Set the bits of tokens that may end the answer now, and clear those that would end an unwanted sequence."""
        if self.ends and self.matcher is not None and self.matcher.is_accepting():
            for token in self.ends:
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        for *before, token in self._unwanted:
            if self._last[len(self._last) - len(before) :] == before:
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))


class Guides:
    """Makes the guides of one model's answers, whose `eos` end them and which has `vocabulary` tokens.

    Matchers need a token without a text that ends an answer, and where nobody names one they take any. A model that has
    none, or whose `eos` are all texts, gets one behind its vocabulary, which no answer is ever given: a bound answer
    then ends where its grammar allows nothing more.
    """

    def __init__(self, tokenizer: Tokenizer, contents: TokenBytes, eos: Collection[int], vocabulary: int) -> None:
        self._ends = frozenset(token for token in eos if contents[token])
        self._eos = sorted({*eos} - self._ends)
        if not self._eos:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.add_special_tokens([_END])
            self._eos = [tokenizer.get_vocab_size() - 1]
        self._tokenizer = tokenizer
        self._vocabulary = max(vocabulary, tokenizer.get_vocab_size())
        self._words = -(-self._vocabulary // 32)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """Takes about a second for a large vocabulary, once."""
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocabulary, eos_token=self._eos)

    def guide(self, generation: Generation) -> Guide | None:
        """What the whole answer is bound to, None for nothing. Slow for large grammars; may be called on any thread.

        Raises GuideError.
        """
        if generation.grammar is None:
            return Guide(self._words, None, generation.bad_words) if generation.bad_words else None
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, generation.grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise GuideError(f"the grammar cannot be followed: {matcher.get_error()}")
        return Guide(self._words, matcher, generation.bad_words, self._ends)


class MaskThread:
    """Computes masks beside whoever asks for them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, rows: Sequence[tuple[int, Guide]]) -> Callable[[], RowMasks] | None:
        """Begin the masks of these rows; what is returned waits for them. None for no rows.

        Nothing may be pushed to the guides before that has returned.
        """
        if not rows:
            return None
        self._pool = self._pool or ThreadPoolExecutor(1, "masks")
        return self._pool.submit(masks, rows).result


def masks(rows: Sequence[tuple[int, Guide]]) -> RowMasks:
    """Of all grammars in one call, which leaves Python's lock to others once."""
    bits = np.full((len(rows), rows[0][1].words), _ALL)
    bound = [(guide.matcher, index) for index, (_, guide) in enumerate(rows) if guide.matcher is not None]
    if bound:
        _executor().unsafe_compute_mask_ptr(bound, bits.ctypes.data, bits.strides[0], len(bits))
    for mask, (_, guide) in zip(bits, rows, strict=True):
        guide.edit(mask)
    return RowMasks(np.array([row for row, _ in rows]), bits)


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(1)
