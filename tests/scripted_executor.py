"""A stand-in for a language model's executor, whose tokens betray every mix-up, and what it ought to answer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pliant.deployments.llm.request import Generation
from pliant.kernels.executor import Output, RowLogprobs, Step
from pliant.sampling import Sampling

EOS = 256
ALPHABET = (*b"aab b\n", *"é日🎉".encode(), 0xFF, EOS)
"""The tokens that answers are made of."""


def byte_tokenizer() -> Tokenizer:
    """Token n is byte n, and token 256 ends answers."""
    alphabet = {character: byte for byte, character in _characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def _characters() -> dict[int, str]:
    visible = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}


def next_token(text: Sequence[int] | np.ndarray, seed: int, index: int) -> int:
    """What follows a text: a function of all of it, of the seed, and of the token's index in its answer."""
    mixed = zlib.crc32(np.asarray(text, np.int64).tobytes(), seed * 1000 + index)
    return ALPHABET[mixed % len(ALPHABET)]


def expected(generation: Generation, max_length: int) -> list[int]:
    """The tokens of the whole answer, were there no stop strings."""
    text = list(generation.prompt)
    for index in range(min(generation.max_tokens, max_length - len(generation.prompt))):
        text.append(next_token(text, generation.sampling.seed, index))
        if text[-1] == EOS and not generation.ignore_eos:
            break
    return text[len(generation.prompt) :]


class _Launched:
    def __init__(self, executor: ScriptedExecutor, output: Output) -> None:
        self._executor = executor
        self._output = output

    def result(self) -> Output:
        assert self._executor.flying.pop(0) is self, "results must be read in the order of the launches"
        return self._output


class ScriptedExecutor:
    """Stores texts by slot and position, as keys and values are stored, and continues them by `next_token`.

    It fails at launch number `fails_at`.
    """

    def __init__(
        self, slots: int = 4, max_length: int = 64, pipelined: bool = False, fails_at: int | None = None
    ) -> None:
        self.slots = slots
        self.max_length = max_length
        self.pipelined = pipelined
        self.steps: list[Step] = []
        self.moves: list[tuple[int, int, int]] = []
        self.flying: list[_Launched] = []
        self.fails_at = fails_at
        self._stored = np.full((slots, max_length), -1, np.int64)
        self._last = np.full(slots, -1, np.int64)
        self._samplings = [Sampling()] * slots

    def admit(self, slot: int, sampling: Sampling) -> None:
        self._samplings[slot] = sampling

    def launch(self, step: Step) -> _Launched:
        if len(self.steps) == self.fails_at:
            raise RuntimeError("out of memory")
        self.steps.append(step)
        assert len(step.lengths) == len(step.indices) <= self.slots - step.offset
        for prefill in step.prefills:
            assert 0 < len(prefill.ids) <= self.max_length - prefill.start
            self._stored[prefill.slot, prefill.start : prefill.start + len(prefill.ids)] = prefill.ids
        ended = [prefill for prefill in step.prefills if prefill.last]
        first = [
            self._next(prefill.slot, prefill.start + len(prefill.ids), int(index))
            for prefill, index in zip(ended, step.prefill_indices, strict=True)
        ]
        tokens = []
        for row, (length, index) in enumerate(zip(step.lengths.tolist(), step.indices.tolist(), strict=True)):
            slot = step.offset + row
            self._stored[slot, length] = self._last[slot]
            tokens.append(self._next(slot, length + 1, index))
            self._last[slot] = tokens[-1]
        for prefill, token in zip(ended, first, strict=True):
            self._last[prefill.slot] = token
        asked = any(sampling.logprobs is not None for sampling in self._samplings)
        launched = _Launched(
            self,
            Output(
                np.array(first, np.int64),
                np.array(tokens, np.int64),
                [RowLogprobs(-1.0, [token, 0], [-1.0, -2.0]) for token in first] if asked else None,
                [RowLogprobs(-1.0, [token, 0], [-1.0, -2.0]) for token in tokens] if asked else None,
            ),
        )
        self.flying.append(launched)
        assert len(self.flying) <= 1 + self.pipelined
        return launched

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        sources, targets = {move[0] for move in moves}, {move[1] for move in moves}
        assert moves
        assert len(sources | targets) == 2 * len(moves)
        self.moves += moves
        for source, target, size in moves:
            self._stored[target, :size] = self._stored[source, :size]
            self._stored[source] = -1
            self._last[target], self._last[source] = self._last[source], -1
            self._samplings[target] = self._samplings[source]

    def _next(self, slot: int, length: int, index: int) -> int:
        return next_token(self._stored[slot, :length], self._samplings[slot].seed, index)
