"""Long texts are read no further than they need to be too long."""

from __future__ import annotations

from typing import Any

import pytest
from support.scripted import TOKENIZER
from tokenizers import Encoding

from pliant.deployments.serving import tokenizing
from pliant.deployments.serving.tokenizing import tokenize


class Counting:
    """A tokenizer of a token for each byte, that remembers how many characters it was given at a time."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.held_lock = 0
        """Characters that it read without leaving other threads alone."""

    def encode(self, text: str, **options: Any) -> Encoding:
        self.held_lock += len(text)
        return self.encode_batch([text], **options)[0]

    def encode_batch(self, texts: list[str], **options: Any) -> list[Encoding]:
        self.given += map(len, texts)
        return TOKENIZER.encode_batch(texts, **options)

    encode_batch_fast = encode_batch


@pytest.mark.parametrize("length", [0, 5, 1_024, 1_025, 16_384, 16_385, 100_000])
async def test_a_text_that_is_short_enough_is_read_whole(length: int) -> None:
    text = "a" * length
    encoding, read = await tokenize(TOKENIZER, text, length)
    assert (encoding.ids, read) == (TOKENIZER.encode(text).ids, length)


@pytest.mark.parametrize("most", [10, 20_000, 50_000])
async def test_of_one_that_is_too_long_little_is_read(most: int) -> None:
    counting: Any = Counting()
    encoding, read = await tokenize(counting, "a" * 4_000_000, most)
    assert len(encoding) > most
    assert read < most + 2 * tokenizing._PIECE
    assert sum(counting.given) < 2 * (most + 2 * tokenizing._PIECE)
    assert counting.held_lock == 0
