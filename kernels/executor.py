"""Runs a decoder's iterations for the engine: prefills, then one fused step for every live request (Flover §V).

The executor keeps on its device what the next iteration needs, the last token of every slot and how to sample, so that
a step takes nothing from the engine but which slots are live and how long their texts are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pliant.kernels import cpu_kernels
from pliant.kernels.decoder import Decoder
from pliant.kernels.decoder import Prefill as Prefill
from pliant.kernels.decoder_kernels import DecoderKernels
from pliant.kernels.decoder_weights import DecoderWeights, SavedWeights
from pliant.kernels.kv_slots import KVSlots, allowed_bytes, fit
from pliant.kernels.sampling import RowLogprobs as RowLogprobs
from pliant.kernels.sampling import Sampled, Sampler, Sampling
from pliant.kernels.upload import upload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Step(NamedTuple):
    """One iteration: the prefills run first, and then, unless the window is empty, one token for each of its slots.

    The window is the slots offset, …, offset + len(lengths) - 1. Every slot in it gets a row, those too whose row means
    nothing: holes, and requests whose prompt is not stored whole or was completed in this very step. The engine ignores
    these rows, and the executor sees to it that a slot whose `last` prefill is in the step keeps the token which that
    gave it; such a slot decodes from the next step on.

    `lengths[row]` counts the tokens that the slot has stored when its row is computed, that is *after* this step's
    prefills, and must be less than max_length: the row stores a key and a value there, even when it means nothing. The
    chunk or token that follows overwrites them. Give 0 for a hole.
    """

    prefills: tuple[Prefill, ...]
    offset: int
    lengths: NDArray[np.int32]
    indices: NDArray[np.int64]
    """By row of the window: the index in its answer of the token to be sampled (see `sampling`)."""
    prefill_indices: NDArray[np.int64]
    """The same for the `last` prefills, in their order."""


class Output(NamedTuple):
    """What a step sampled."""

    first: NDArray[np.int64]
    """A token for each `last` prefill, in order."""
    tokens: NDArray[np.int64]
    """A token for each row of the window; see `Step` for those to ignore."""
    first_logprobs: list[RowLogprobs | None] | None
    logprobs: list[RowLogprobs | None] | None
    """For each row what it asked for; None if no row asked."""


class Launched(Protocol):
    """A step under way."""

    def result(self) -> Output:
        """What it sampled, as soon as the device has it. Results are read in the order of the launches, once each."""


class Done:
    """A step that is over, and what it sampled for its `last` prefills and its window, on the CPU."""

    def __init__(self, first: Sampled | None, window: Sampled | None) -> None:
        self._first = first
        self._window = window

    def result(self) -> Output:
        first, window = self._first, self._window
        return Output(_tokens(first), _tokens(window), _logprobs(first), _logprobs(window))


class Executor:
    """A decoder, its slots and its sampler behind one interface, computing at once on the calling thread.

    Calls must not overlap. `slots` says how many requests fit, `max_length` how many tokens each, prompt and answer
    together.
    """

    pipelined: bool = False
    """Whether to launch step t + 1 before reading the result of step t, because the device computes meanwhile."""

    def __init__(self, decoder: Decoder, sampler: Sampler) -> None:
        self.shape = decoder.shape
        self.slots = decoder.kv.slots
        self.max_length = decoder.kv.max_length
        self._decoder = decoder
        self._sampler = sampler
        self._last = torch.zeros(self.slots, dtype=torch.int64, device=decoder.device)
        """By slot: the last token of its text, which is not stored yet."""

    def admit(self, slot: int, sampling: Sampling) -> None:
        """From the next launch on, sample for `slot` in this way."""
        self._sampler.set(slot, sampling)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Run one iteration. Raises ValueError, and computes nothing, if the step does not fit into the slots."""
        self.check(step)
        first = self._prefill(step)
        window = self._decode(step)
        if first is not None:
            self._last[self._ended(step)] = first.tokens
        return self._launched(first, window)

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move requests with all that is theirs to other slots: (source, target, tokens stored).

        No slot is both a source and a target, nor the target of two moves.
        """
        if not moves:
            return
        self._decoder.kv.move(moves)
        sources, targets, _ = upload(np.array(moves).T, self._last.device)
        self._last[targets] = self._last[sources]
        self._sampler.move(moves)

    def check(self, step: Step) -> None:
        """Raise ValueError if the window of `step` leaves the slots, or its numbers do not fit together."""
        rows, ended = len(step.lengths), sum(prefill.last for prefill in step.prefills)
        if not 0 <= step.offset <= step.offset + rows <= self.slots:
            raise ValueError(f"the window {step.offset} to {step.offset + rows} is not within {self.slots} slots")
        if rows and not 0 <= step.lengths.min() <= step.lengths.max() < self.max_length:
            raise ValueError(
                f"slots to decode must hold 0 to {self.max_length - 1} tokens, one less than max_length; got "
                f"{step.lengths.min()} to {step.lengths.max()}"
            )
        if len(step.indices) != rows or len(step.prefill_indices) != ended:
            raise ValueError(
                f"a step needs an index for each of {rows} rows and {ended} prompts that end; got {len(step.indices)} "
                f"and {len(step.prefill_indices)}"
            )

    def _prefill(self, step: Step) -> Sampled | None:
        if not step.prefills:
            return None
        logits = self._decoder.prefill(step.prefills)
        if not len(logits):
            return None
        return self._sampler.sample(logits, self._ended(step), self._indices(step.prefill_indices))

    def _decode(self, step: Step) -> Sampled | None:
        rows = len(step.lengths)
        if not rows:
            return None
        window = slice(step.offset, step.offset + rows)
        sampled = self._sampler.sample(self._logits(step), window, self._indices(step.indices))
        self._last[window] = sampled.tokens
        return sampled

    def _logits(self, step: Step) -> torch.Tensor:
        """Of the rows of the window, [n, vocab]."""
        window = slice(step.offset, step.offset + len(step.lengths))
        return self._decoder.decode(self._last[window], step.offset, upload(step.lengths, self._last.device))

    def _launched(self, first: Sampled | None, window: Sampled | None) -> Launched:
        return Done(first, window)

    def _ended(self, step: Step) -> torch.Tensor:
        """The slots of the `last` prefills."""
        slots = [prefill.slot for prefill in step.prefills if prefill.last]
        return upload(np.array(slots, np.int64), self._last.device)

    def _indices(self, indices: NDArray[np.int64]) -> torch.Tensor:
        return upload(indices, self._last.device)


def _tokens(sampled: Sampled | None) -> NDArray[np.int64]:
    return np.empty(0, np.int64) if sampled is None else sampled.tokens.cpu().numpy()


def _logprobs(sampled: Sampled | None) -> list[RowLogprobs | None] | None:
    return None if sampled is None else sampled.logprobs


def load(
    folder: Path,
    slots: int | None = None,
    max_length: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int = 1,
    budget_bytes: int | None = None,
) -> Executor:
    """The decoder in `folder`, ready to run. `slots` and `max_length` that are None are chosen (see `kv_slots.fit`).

    `budget_bytes` is for keys and values (see `kv_slots.allowed_bytes`). On CPUs this sets the whole process's
    number of torch threads to `threads`: a process serves one decoder. Raises ModelError if the folder holds no decoder
    that is supported, KVMemoryError if the slots do not fit, and ValueError for a max_length beyond the model's.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return build(SavedWeights(folder, DTYPES[dtype], torch.device(device)), slots, max_length, threads, budget_bytes)


def build(
    weights: DecoderWeights,
    slots: int | None = None,
    max_length: int | None = None,
    threads: int = 1,
    budget_bytes: int | None = None,
) -> Executor:
    """As `load`, from weights of any origin."""
    shape, dtype, device = weights.shape, weights.dtype, weights.device
    packed = shape.vocab * shape.hidden if shape.tied and device.type == "cpu" else 0  # the head, as a copy of its own
    allowed = allowed_bytes(device, budget_bytes, reserved=(shape.parameters() + packed) * dtype.itemsize)
    slots, max_length = fit(shape, slots, max_length, dtype, allowed)
    kernels, kind = _on_cuda() if device.type == "cuda" else _on_cpu(threads)
    with torch.inference_mode():
        kv = KVSlots(shape, slots, max_length, dtype, device, kernels, allowed)
        return kind(Decoder(weights, kernels, kv), Sampler(slots, shape.vocab, device))


def _on_cpu(threads: int) -> tuple[DecoderKernels, type[Executor]]:
    torch.set_num_threads(threads)
    return cpu_kernels.best(threads), Executor


def _on_cuda() -> tuple[DecoderKernels, type[Executor]]:
    """Imports what needs Triton, which is not there on every machine without a GPU."""
    from pliant.kernels.cuda_executor import CudaExecutor
    from pliant.kernels.cuda_kernels import CudaKernels

    return CudaKernels(), CudaExecutor
