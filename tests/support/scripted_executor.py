"""A stand-in for a language model's executor, whose tokens betray every mix-up, and what it ought to answer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pliant.deployments.llm.request import Generation
from pliant.formats.adapter_info import AdapterError, AdapterRef
from pliant.kernels.decoder.decode_step import Output, RowLogprobs, RowMasks, Step
from pliant.sampling import Sampling

EOS = 256
ALPHABET = (*b"aab b\n", *"é日🎉".encode(), 0xFF, EOS)
"""The tokens that answers are made of."""
SLOT_BYTES = 64
WEIGHT_BYTES = 320


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
    mark = 0 if generation.adapter is None else mark_of(weights(generation.adapter))
    text = [stored(token, mark) for token in generation.prompt]
    answer: list[int] = []
    for index in range(min(generation.max_tokens, max_length - len(generation.prompt))):
        answer.append(next_token(text, generation.sampling.seed, index))
        text.append(stored(answer[-1], mark))
        if answer[-1] == EOS and not generation.ignore_eos:
            break
    return answer


def stored(token: int, mark: int) -> int:
    """What a slot keeps of a token: the adapter that it was computed with leaves its mark in keys and values."""
    return token | mark << 16


def score(text: Sequence[int] | np.ndarray, target: int, alternatives: int) -> RowLogprobs:
    """How likely `target` is behind a text: a function of all of both."""
    mixed = zlib.crc32(np.array([*text, target], np.int64).tobytes())
    return RowLogprobs(-(mixed % 997) / 8, [*range(alternatives)], [-1.0 * n for n in range(alternatives)], mixed % 7)


def mark_of(blob: torch.Tensor) -> int:
    return zlib.crc32(blob.numpy().tobytes())


def adapter(name: str, size: int = 32, folder: str = "there") -> AdapterRef:
    """An adapter that takes `size` bytes; in the folder "broken" it cannot be read."""
    return AdapterRef(name, folder, "1", (size,))


def weights(ref: AdapterRef) -> torch.Tensor:
    """The blob of `ref`: other bytes for each."""
    return torch.from_numpy(np.random.default_rng(zlib.crc32(ref.key.encode())).integers(0, 256, ref.rank, np.uint8))


class ScriptedAdapters:
    """Where adapters come from; `staged` are those that were read."""

    def __init__(self) -> None:
        self.staged: list[AdapterRef] = []
        self.broken: set[str] = set()
        """Names that cannot be read."""

    def bytes(self, ref: AdapterRef) -> int:
        return ref.rank

    def stage(self, ref: AdapterRef) -> torch.Tensor:
        self.staged.append(ref)
        if ref.folder == "broken" or ref.name in self.broken:
            raise AdapterError("its weights are missing")
        return weights(ref)


class _Launched:
    def __init__(self, executor: ScriptedExecutor, output: Output, uses: set[str | None]) -> None:
        self._executor = executor
        self._output = output
        self.uses = uses

    def result(self) -> Output:
        assert self._executor.flying.pop(0) is self, "results must be read in the order of the launches"
        return self._output


def _by_row(masks: Callable[[], RowMasks] | None) -> dict[int, np.ndarray]:
    """The tokens that rows may be given, in order."""
    if masks is None:
        return {}
    rows, bits = masks()
    flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return {row: np.flatnonzero(allowed) for row, allowed in zip(rows.tolist(), flags, strict=True)}


def _allowed(token: int, mask: np.ndarray | None) -> int:
    """`token`, or one that `mask` allows; 0 if that allows none."""
    if mask is None or token in mask:
        return token
    return int(mask[token % len(mask)]) if len(mask) else 0


class ScriptedExecutor:
    """Stores texts in pages, as keys and values are stored, and continues them by `next_token`.

    Pages of `page` tokens, by default of `max_length`, and adapters share `arena_bytes`, by default those of the
    longest texts for all slots; each of these takes `SLOT_BYTES`. It fails at launch number `fails_at`.
    """

    def __init__(
        self,
        slots: int = 4,
        max_length: int = 64,
        pipelined: bool = False,
        fails_at: int | None = None,
        arena_bytes: int | None = None,
        page: int | None = None,
    ) -> None:
        self.slots = slots
        self.vocabulary = EOS + 1
        self.weight_bytes = WEIGHT_BYTES
        self.page = page or max_length
        self.page_bytes = SLOT_BYTES * self.page // max_length
        self.arena_bytes = max(slots * SLOT_BYTES, arena_bytes or 0)
        self.installed: dict[str, torch.Tensor] = {}
        self.limit = self.arena_bytes // self.page_bytes
        self.max_length = max_length
        self.pipelined = pipelined
        self.steps: list[Step] = []
        self.moves: list[tuple[int, int]] = []
        self.page_moves: list[tuple[int, int]] = []
        self.flying: list[_Launched] = []
        self.fails_at = fails_at
        self._stored = np.full((self.limit + 1, self.page), -1, np.int64)
        """By page and place."""
        self._last = np.full(slots, -1, np.int64)
        self._samplings = [Sampling()] * slots
        self._keys: list[str | None] = [None] * slots

    def install(self, key: str, ranks: tuple[int, ...], blob: torch.Tensor) -> None:
        assert key not in self.installed
        assert blob.nbytes == max(ranks)
        self.installed[key] = blob
        self._check_memory()

    def remove(self, key: str) -> None:
        assert not any(key in flying.uses for flying in self.flying), f"{key} is used by a step under way"
        del self.installed[key]

    def keep_pages(self, count: int) -> None:
        assert 0 <= count < len(self._stored)
        self.limit = count
        self._stored[count + 1 :] = -1  # adapters lie there
        self._check_memory()

    def _check_memory(self) -> None:
        used = sum(blob.nbytes for blob in self.installed.values())
        assert self.limit * self.page_bytes + used <= self.arena_bytes, f"{used} bytes of adapters, {self.limit} pages"

    def admit(
        self, slot: int, sampling: Sampling, adapter: str | None, prompt: NDArray[np.int32], answer: NDArray[np.int32]
    ) -> None:
        assert adapter is None or adapter in self.installed
        self._samplings[slot] = sampling
        self._keys[slot] = adapter

    def _mark(self, slot: int) -> int:
        """Of the adapter that `slot` uses; a hole may go on naming one that was removed."""
        key = self._keys[slot]
        return 0 if key is None else mark_of(self.installed[key]) if key in self.installed else -1

    def launch(self, step: Step) -> _Launched:
        if len(self.steps) == self.fails_at:
            raise RuntimeError("out of memory")
        self.steps.append(step)
        assert len(step.lengths) == len(step.indices) <= self.slots - step.offset
        live = [step.offset + row for row in np.flatnonzero(step.lengths).tolist()]
        uses = {self._keys[slot] for slot in (*live, *(prefill.slot for prefill in step.prefills))}
        assert uses <= {None, *self.installed}
        for prefill in step.prefills:
            assert 0 < len(prefill.ids) <= self.max_length - prefill.start
            assert 0 <= prefill.ids.min() <= prefill.ids.max() < self.vocabulary
            assert prefill.slot < self.slots
            assert 0 < prefill.pages.min() <= prefill.pages.max() <= self.limit
            mark = self._mark(prefill.slot)
            marked = [stored(token, mark) for token in prefill.ids.tolist()]
            for position, one in enumerate(marked, prefill.start):
                self._stored[prefill.pages[position // self.page], position % self.page] = one
        ended = [prefill for prefill in step.prefills if prefill.last]
        masks = _by_row(step.prefill_masks)
        first = [
            _allowed(
                self._next(prefill.slot, prefill.pages, prefill.start + len(prefill.ids), int(index)), masks.get(row)
            )
            for row, (prefill, index) in enumerate(zip(ended, step.prefill_indices, strict=True))
        ]
        masks = _by_row(step.masks)
        tokens = []
        for row, (length, index) in enumerate(zip(step.lengths.tolist(), step.indices.tolist(), strict=True)):
            slot, pages = step.offset + row, step.tables[row]
            page = pages[length // self.page]
            assert (0 < page <= self.limit) if length else not pages.any()
            self._stored[page, length % self.page] = stored(int(self._last[slot]), self._mark(slot))
            tokens.append(_allowed(self._next(slot, pages, length + 1, index), masks.get(row)))
            if length:
                self._last[slot] = tokens[-1]
        for prefill, token in zip(ended, first, strict=True):
            self._last[prefill.slot] = token
        scored = [
            [
                score(self._text(prefill.pages, prefill.start + at), target, prefill.alternatives)
                for at, target in enumerate(prefill.targets.tolist(), 1)
            ]
            for prefill in step.prefills
        ]
        asked = any(sampling.logprobs is not None for sampling in self._samplings)
        launched = _Launched(
            self,
            Output(
                np.array(first, np.int64),
                np.array(tokens, np.int64),
                [RowLogprobs(-1.0, [token, 0], [-1.0, -2.0]) for token in first] if asked else None,
                [RowLogprobs(-1.0, [token, 0], [-1.0, -2.0]) for token in tokens] if asked else None,
                scored if any(scored) else None,
            ),
            uses,
        )
        self.flying.append(launched)
        assert len(self.flying) <= 1 + self.pipelined
        return launched

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        self._check_moves(moves, self.slots)
        self.moves += moves
        for source, target in moves:
            self._last[target], self._last[source] = self._last[source], -1
            self._samplings[target] = self._samplings[source]
            self._keys[target] = self._keys[source]

    def move_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        self._check_moves(moves, self.limit + 1)
        self.page_moves += moves
        for source, target in moves:
            self._stored[target], self._stored[source] = self._stored[source], -1

    def _check_moves(self, moves: Sequence[tuple[int, int]], end: int) -> None:
        sources, targets = {source for source, _ in moves}, {target for _, target in moves}
        assert moves
        assert len(sources | targets) == 2 * len(moves)
        assert max(targets) < end

    def _next(self, slot: int, pages: np.ndarray, length: int, index: int) -> int:
        return next_token(self._text(pages, length), self._samplings[slot].seed, index)

    def _text(self, pages: np.ndarray, length: int) -> np.ndarray:
        return self._stored[pages].flatten()[:length]
