"""Tokenizes texts of strangers: off the event loop, and with no more memory than what a model takes is worth.

A tokenizer takes a few hundred bytes and a microsecond for a character, and `encode` keeps Python's lock all that time;
`encode_batch` does not. So a long text is read piece by piece first, and no further than it needs to be too long.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Encoding, Tokenizer

from pliant.texts import Text

CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this per token that a model takes is too long without looking closer."""
_SHORT = 1_024
"""Characters of a text that takes a millisecond: the event loop tokenizes it."""
_PIECE = 16_384
_CUT_TOKENS = 16
"""By which a piece alone may have more tokens than within its text."""
_long_texts = ThreadPoolExecutor(1, "long-texts")
"""One is in memory at a time, and texts of usual lengths need not wait for it."""


async def tokenize(
    tokenizer: Tokenizer, text: str, most: int, special: bool = True, offsets: bool = False
) -> tuple[Encoding, int]:
    """The tokens of `text`, and how many of its characters these are.

    That is less than all of them only if they have more than `most` tokens already. With `special`, tokens are added
    that a model wants around a text; with `offsets`, the encoding says where in the text each token is from.
    """
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=special), len(text)

    def read() -> tuple[Encoding, int]:
        encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        end = _end(tokenizer, text, most)
        return encode([text[:end]], add_special_tokens=special)[0], end

    if len(text) <= _PIECE:
        return await asyncio.to_thread(read)
    return await asyncio.get_running_loop().run_in_executor(_long_texts, read)


def encoded(tokenizer: Tokenizer, text: Text) -> Encoding:
    """The tokens of a text, or of a pair, that is known to be short."""
    return tokenizer.encode(text) if isinstance(text, str) else tokenizer.encode(text.first, text.second)


def types_of(encoding: Encoding) -> bytes:
    """uint8 per token: of which of two texts it is; empty if all are of the first."""
    return bytes(encoding.type_ids) if any(encoding.type_ids) else b""


async def tokenize_pair(tokenizer: Tokenizer, first: str, second: str, most: int) -> tuple[Encoding, int]:
    """The tokens of two texts that are read together, and how many of their characters these are, as `tokenize`."""
    if len(first) + len(second) <= _SHORT:
        return tokenizer.encode(first, second), len(first) + len(second)

    def read() -> tuple[Encoding, int]:
        ends = _end(tokenizer, first, most), _end(tokenizer, second, most)
        return tokenizer.encode_batch([(first[: ends[0]], second[: ends[1]])])[0], sum(ends)

    return await asyncio.get_running_loop().run_in_executor(_long_texts, read)


def _end(tokenizer: Tokenizer, text: str, most: int) -> int:
    """How much of `text` is to be read: all of it, or what has more than `most` tokens for sure."""
    if len(text) <= _PIECE:
        return len(text)
    tokens = 0
    for end in range(_PIECE, len(text), _PIECE):
        piece = tokenizer.encode_batch_fast([text[end - _PIECE : end]], add_special_tokens=False)[0]
        tokens += len(piece) - _CUT_TOKENS
        if tokens > most:
            return end
    return len(text)
