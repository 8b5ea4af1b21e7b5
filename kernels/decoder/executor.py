"""Runs a decoder's iterations for the engine: prefills, then one fused step for every live request (Flover §V).

The executor keeps on its device what the next iteration needs, the last token of every slot, how to sample and which
adapter to use, so that a step takes nothing from the engine but which slots are live and how long their texts are.

Slots and adapters share one arena (Chameleon §4.1): `keep_slots` says how many slots it holds from now on, and the rest
is room for adapters, which the engine has loaded (`stage`), copied in (`install`) and dropped (`remove`).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pliant.formats.adapter_info import AdapterInfo
from pliant.kernels.decoder import adapter_weights, cpu_kernels
from pliant.kernels.decoder.decode_step import Launched, Output, RowLogprobs, Step
from pliant.kernels.decoder.kernels import DecoderKernels
from pliant.kernels.decoder.kv_slots import KVSlots, allowed_bytes, fit
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.sampling import Sampled, Sampler, Sampling
from pliant.kernels.decoder.slot_adapters import SlotAdapters
from pliant.kernels.decoder.weights import DecoderWeights, SavedWeights
from pliant.kernels.upload import upload

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    together. Adapters have ranks of up to `most_rank`; 0 stands for no adapters at all.
    """

    pipelined: bool = False
    """Whether to launch step t + 1 before reading the result of step t, because the device computes meanwhile."""

    def __init__(self, decoder: Decoder, sampler: Sampler, most_rank: int = 0) -> None:
        kv = decoder.kv
        self.shape = decoder.shape
        self.vocabulary = decoder.shape.vocab
        self.slots = kv.slots
        self.max_length = kv.max_length
        self.slot_bytes = kv.slot_bytes
        self.arena_bytes = kv.arena.nbytes
        """What slots and adapters may take together."""
        self.adapters = most_rank > 0
        """Whether adapters may be installed."""
        self._adapters = SlotAdapters(decoder.shape, kv.slots, kv.arena, most_rank)
        self._decoder = decoder
        self._sampler = sampler
        self._last = torch.zeros(self.slots, dtype=torch.int64, device=decoder.device)
        """By slot: the last token of its text, which is not stored yet."""

    def stage(self, adapter: AdapterInfo) -> torch.Tensor:
        """An adapter's weights, on the CPU, to be installed. Slow; may be called on any thread. Raises AdapterError."""
        kv = self._decoder.kv
        return adapter_weights.stage(adapter, self.shape, kv.arena.dtype, kv.arena.device)

    def install(self, key: str, ranks: Sequence[int], blob: torch.Tensor) -> None:
        """Copy a staged adapter of `ranks` (by `lora_layout.MODULES`) behind the slots; others may move for it.

        Raises PoolError if there is no room or `key` is installed, and ValueError if the blob or its ranks are wrong.
        """
        self._adapters.install(key, ranks, blob)

    def remove(self, key: str) -> None:
        """Give back an adapter's memory. No slot may use it in later steps. Raises KeyError if it is not installed."""
        self._adapters.remove(key)

    def keep_slots(self, limit: int) -> None:
        """From now on only the first `limit` slots are used, all at first; what lies behind them is for adapters.

        Raises PoolError if those that are installed do not fit there.
        """
        self._adapters.keep(limit * self._decoder.kv.slot_values)

    def admit(
        self,
        slot: int,
        sampling: Sampling,
        adapter: str | None = None,
        prompt: NDArray[np.int32] = _NO_IDS,
        answer: NDArray[np.int32] = _NO_IDS,
    ) -> None:
        """From the next launch on, sample for `slot` in this way, and use the installed adapter of that key. `prompt`
        and what there is of the `answer` are what penalties are for.

        Raises PoolError if it is not installed.
        """
        self._adapters.assign(slot, adapter)
        self._sampler.set(slot, sampling, prompt, answer)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Run one iteration. Raises ValueError, and computes nothing, if the step does not fit into the slots."""
        self.check(step)
        first = self._prefill(step)
        window = self._decode(step)
        if first is not None:
            self._keep(self._ended(step), first.tokens, step.prefill_indices)
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
        self._adapters.move(moves)

    def check(self, step: Step) -> None:
        """Raise ValueError if the window of `step` leaves the slots, or its numbers do not fit together.

        Raises PoolError if it uses an adapter that was removed.
        """
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
        self._adapters.check([prefill.slot for prefill in step.prefills])
        self._adapters.check((np.flatnonzero(step.lengths) + step.offset).tolist())

    def _prefill(self, step: Step) -> Sampled | None:
        if not step.prefills:
            return None
        slots, sizes = [prefill.slot for prefill in step.prefills], [len(prefill.ids) for prefill in step.prefills]
        logits = self._decoder.prefill(step.prefills, self._adapters.of_chunks(slots, sizes))
        if not len(logits):
            return None
        masks = step.prefill_masks and step.prefill_masks()
        return self._sampler.sample(logits, self._ended(step), self._indices(step.prefill_indices), masks=masks)

    def _decode(self, step: Step) -> Sampled | None:
        rows = len(step.lengths)
        if not rows:
            return None
        window = slice(step.offset, step.offset + rows)
        logits = self._logits(step)
        masks = step.masks and step.masks()
        sampled = self._sampler.sample(logits, window, self._indices(step.indices), masks=masks)
        self._keep(window, sampled.tokens, step.indices)
        return sampled

    def _keep(self, slots: slice | torch.Tensor, tokens: torch.Tensor, indices: NDArray[np.int64]) -> None:
        """These are the tokens of the answers in `slots` at the places `indices`."""
        self._last[slots] = tokens
        if self._sampler.remembers:
            self._sampler.record(slots, self._indices(indices), tokens)

    def _logits(self, step: Step) -> torch.Tensor:
        """Of the rows of the window, [n, vocab]."""
        tokens = self._last[step.offset : step.offset + len(step.lengths)]
        lora = self._adapters.of_window(step.offset, step.lengths)
        return self._decoder.decode(tokens, step.offset, upload(step.lengths, self._last.device), lora)

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
    arena_bytes: int | None = None,
    most_rank: int = 0,
) -> Executor:
    """The decoder in `folder`, ready to run. `slots` and `max_length` that are None are chosen (see `kv_slots.fit`).

    `budget_bytes` is what keys, values and adapters may take (see `kv_slots.allowed_bytes`), `arena_bytes` what they do
    take, if that is more than the slots need, and `most_rank` the greatest rank of an adapter; 0 for none.

    On CPUs this sets the whole process's number of torch threads to `threads`: a process serves one decoder. Raises
    ModelError if the folder holds no decoder that is supported, KVMemoryError if the slots do not fit, and ValueError
    for a max_length beyond the model's.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    weights = SavedWeights(folder, DTYPES[dtype], torch.device(device))
    return build(weights, slots, max_length, threads, budget_bytes, arena_bytes, most_rank)


def build(
    weights: DecoderWeights,
    slots: int | None = None,
    max_length: int | None = None,
    threads: int = 1,
    budget_bytes: int | None = None,
    arena_bytes: int | None = None,
    most_rank: int = 0,
) -> Executor:
    """As `load`, from weights of any origin.

    What is reserved beside the slots are the weights. Loads of adapters take no memory of a GPU but their place in the
    arena (see `adapter_weights`). CUDA graphs take what a step's activations do, the second set hardly more as it uses
    the first one's memory again: a tenth of a GPU is left for these where `budget_bytes` is None, and whoever sets it
    leaves some.
    """
    shape, dtype, device = weights.shape, weights.dtype, weights.device
    packed = shape.vocab * shape.hidden if shape.tied and device.type == "cpu" else 0  # the head, as a copy of its own
    allowed = allowed_bytes(device, budget_bytes, reserved=(shape.parameters() + packed) * dtype.itemsize)
    slots, max_length = fit(shape, slots, max_length, dtype, allowed)
    kernels, kind = _on_cuda() if device.type == "cuda" else _on_cpu(threads)
    with torch.inference_mode():
        kv = KVSlots(shape, slots, max_length, dtype, device, kernels, allowed, arena_bytes)
        return kind(Decoder(weights, kernels, kv), Sampler(slots, shape.vocab, device, max_length), most_rank)


def _on_cpu(threads: int) -> tuple[DecoderKernels, type[Executor]]:
    torch.set_num_threads(threads)
    return cpu_kernels.best(threads), Executor


def _on_cuda() -> tuple[DecoderKernels, type[Executor]]:
    """Imports what needs Triton, which is not there on every machine without a GPU."""
    from pliant.kernels.decoder.cuda_executor import CudaExecutor
    from pliant.kernels.decoder.cuda_kernels import CudaKernels

    return CudaKernels(), CudaExecutor
