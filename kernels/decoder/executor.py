"""Runs a decoder's iterations for the engine: one fused pass for prefills and every live request (Flover §V).

The executor keeps on its device what the next iteration needs, the last token of every slot, how to sample and which
adapter to use, so that a step takes nothing from the engine but which slots are live, how long their texts are, and in
which pages these lie.

Pages and adapters share one arena (Chameleon §4.1): `keep_pages` says how many pages it holds from now on, and the rest
is room for adapters, which the engine has loaded (`stage`), copied in (`install`) and dropped (`remove`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.formats.adapter_info import AdapterInfo
from pliant.kernels import triton_cache
from pliant.kernels.decoder import adapter_weights, cpu_kernels, fp8
from pliant.kernels.decoder.decode_step import Launched, Output, Prefill, RowLogprobs, Step
from pliant.kernels.decoder.kernels import DecoderKernels, TorchKernels
from pliant.kernels.decoder.kv_pages import PAGE, KVPages, allowed_bytes, fit
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.prompt_scores import Scored, Scoring
from pliant.kernels.decoder.ragged import Ragged, Span, ragged
from pliant.kernels.decoder.sampling import Sampled, Sampler, Sampling
from pliant.kernels.decoder.slot_adapters import SlotAdapters
from pliant.kernels.decoder.weights import DecoderWeights, SavedWeights
from pliant.kernels.upload import upload
from pliant.models.decoder_shape import Quantize

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Computed(NamedTuple):
    """What a pass gives."""

    logits: Tensor
    """[n, vocab]"""
    scored: Scored | None = None
    """Of the targets of its chunks, if there are any."""
    drawn: Tensor | None = None
    """What `Sampler.draw` gives for the window, if the pass drew it, and kept it as the slots' last tokens."""


class Done:
    """A step that is over: what it sampled for its `last` prefills and its window, and `scored`, on the CPU."""

    def __init__(self, first: Sampled | None, window: Sampled | None, scored: Scored | None) -> None:
        self._first = first
        self._window = window
        self._scored = scored

    def result(self) -> Output:
        first, window, scored = self._first, self._window, self._scored
        targets = None if scored is None else scored.by_chunk()
        return Output(_tokens(first), _tokens(window), _logprobs(first), _logprobs(window), targets)


class Executor:
    """A decoder, its pages and its sampler behind one interface, computing at once on the calling thread.

    Calls must not overlap. `slots` says how many requests it computes at a time, `max_length` how many tokens each may
    have, prompt and answer together. Adapters have ranks of up to `most_rank`; 0 stands for no adapters at all.
    """

    pipelined: bool = False
    """Whether to launch step t + 1 before reading the result of step t, because the device computes meanwhile."""

    def __init__(self, decoder: Decoder, sampler: Sampler, most_rank: int = 0) -> None:
        kv = decoder.kv
        self.shape = decoder.whole
        self.vocabulary = decoder.whole.vocab
        self.slots = kv.slots
        self.max_length = kv.max_length
        self.page = PAGE
        """Tokens of a page."""
        self.page_bytes = kv.page_bytes
        self.arena_bytes = kv.arena.nbytes - kv.page_bytes
        """What pages and adapters may take together, beside page 0, which belongs to nobody."""
        self.weight_bytes = decoder.weight_bytes
        """Of the model, or of a rank's share of it."""
        self.adapters = most_rank > 0
        """Whether adapters may be installed."""
        self._adapters = SlotAdapters(decoder.shape, kv.slots, kv.arena, most_rank)
        self._decoder = decoder
        self._sampler = sampler
        self._last = torch.zeros(self.slots, dtype=torch.int64, device=decoder.device)
        """By slot: the last token of its text, which is not stored yet."""

    def stage(self, adapter: AdapterInfo) -> Tensor:
        """An adapter's weights, on the CPU, to be installed. Slow; may be called on any thread. Raises AdapterError."""
        kv = self._decoder.kv
        return adapter_weights.stage(adapter, self.shape, kv.arena.dtype, kv.arena.device)

    def install(self, key: str, ranks: Sequence[int], blob: Tensor) -> None:
        """Copy a staged adapter of `ranks` (by `lora_layout.MODULES`) behind the pages; others may move for it.

        Raises PoolError if there is no room or `key` is installed, and ValueError if the blob or its ranks are wrong.
        """
        self._adapters.install(key, ranks, blob)

    def remove(self, key: str) -> None:
        """Give back an adapter's memory. No slot may use it in later steps. Raises KeyError if it is not installed."""
        self._adapters.remove(key)

    def keep_pages(self, count: int) -> None:
        """From now on only pages 0 to `count` are used, all at first; what lies behind them is for adapters.

        Raises PoolError if those that are installed do not fit there.
        """
        self._adapters.keep((count + 1) * self._decoder.kv.page_values)

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
        rows, window, first = len(step.lengths), None, None
        if not (rows or step.prefills):
            return self._launched(None, None, None)
        logits, scored, drawn = self._computed(step)
        if rows:
            window = self._of_window(step, logits[:rows], drawn)
        if ended := [prefill.slot for prefill in step.prefills if prefill.last]:
            their_slots = upload(np.array(ended, np.int64), self._last.device)
            masks = step.prefill_masks and step.prefill_masks()
            needs = self._sampler.needs(ended, int(step.prefill_indices.max()))
            places = self._indices(step.prefill_indices)
            first = self._sampler.sample(logits[rows:], their_slots, places, needs, masks)
            self._keep(their_slots, first.tokens, step.prefill_indices)
        return self._launched(first, window, scored)

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move requests to other slots, (source, target); their keys and values stay where they are.

        No slot is both a source and a target, nor the target of two moves.
        """
        if not moves:
            return
        sources, targets = upload(np.array(moves).T, self._last.device)
        self._last[targets] = self._last[sources]
        self._sampler.move(moves)
        self._adapters.move(moves)

    @torch.inference_mode()
    def move_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy pages to others, (source, target). No page is both, nor the target of two moves."""
        self._decoder.kv.move(moves)

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
        if rows and step.tables.shape[1] * self.page <= step.lengths.max():
            raise ValueError(
                f"{step.tables.shape[1]} pages do not hold the texts, of up to {step.lengths.max()} tokens"
            )
        if len(step.indices) != rows or len(step.prefill_indices) != ended:
            raise ValueError(
                f"a step needs an index for each of {rows} rows and {ended} prompts that end; got {len(step.indices)} "
                f"and {len(step.prefill_indices)}"
            )
        for prefill in step.prefills:
            self._check_prefill(prefill)
        self._adapters.check(step)

    def _of_window(self, step: Step, logits: Tensor, drawn: Tensor | None) -> Sampled:
        """What its rows sample; that of rows which mean something is kept."""
        slots = slice(step.offset, step.offset + len(logits))
        masks = step.masks and step.masks()
        live = np.flatnonzero(step.lengths)
        needs = self._sampler.needs((step.offset + live).tolist(), int(step.indices[live].max(initial=0)))
        if drawn is not None and masks is None and needs.drawable:
            return self._sampler.sampled(logits, slots, drawn, needs)
        sampled = self._sampler.sample(logits, slots, self._indices(step.indices), needs, masks)
        rows = self._indices(live)
        self._keep(rows + step.offset, sampled.tokens[rows], step.indices[live])
        return sampled

    def _keep(self, slots: Tensor, tokens: Tensor, indices: NDArray[np.int64]) -> None:
        """These are the tokens of the answers in `slots` at the places `indices`."""
        self._last[slots] = tokens
        if self._sampler.remembers:
            self._sampler.record(slots, self._indices(indices), tokens)

    def _check_prefill(self, chunk: Prefill) -> None:
        stop = chunk.start + len(chunk.ids)
        if not 0 <= chunk.slot < self.slots or not 0 <= chunk.start < stop <= self.max_length:
            raise ValueError(
                f"a chunk of tokens {chunk.start} to {stop} for slot {chunk.slot} does not fit: there are "
                f"{self.slots} slots of {self.max_length} tokens, and a chunk has at least one"
            )
        if len(chunk.pages) * self.page < stop:
            raise ValueError(f"{len(chunk.pages)} pages do not hold a chunk's text of {stop} tokens")
        if len(chunk.targets) > len(chunk.ids):
            raise ValueError(f"a chunk of {len(chunk.ids)} tokens cannot have {len(chunk.targets)} targets")
        ids = np.concatenate((chunk.ids, chunk.targets))
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.shape.vocab:
            raise ValueError(f"token ids must lie in 0 to {self.shape.vocab - 1}, got {low} to {high}")

    def _computed(self, step: Step) -> Computed:
        """The pass of `step`: logits of the rows of the window, and behind them of the `last` prefills."""
        return self.compute(step, self._window(step))

    def _window(self, step: Step) -> Tensor:
        """The last tokens of the window's slots."""
        return self._last[step.offset : step.offset + len(step.lengths)]

    @torch.inference_mode()
    def compute(self, step: Step, tokens: Tensor) -> Computed:
        """The pass of a step whose window's slots have `tokens` as their last; nothing is sampled."""
        ends = scoring = None
        if step.prefills:
            tokens = torch.cat([tokens, self._indices(np.concatenate([chunk.ids for chunk in step.prefills]))])
            ends = self._indices(_ends(step))
            if any(len(chunk.targets) for chunk in step.prefills):
                scoring = Scoring(step, self.shape.vocab, self._last.device)
        logits = self._decoder.run(tokens, self._ragged(step), ends, self._adapters.of_step(step), scoring)
        return Computed(logits, scoring.scored() if scoring else None)

    def _ragged(self, step: Step) -> Ragged:
        chunks = [(Span(chunk.start, len(chunk.ids)), chunk.pages) for chunk in step.prefills]
        return ragged(step.lengths, step.tables, chunks, self.page, self._last.device)

    def _launched(self, first: Sampled | None, window: Sampled | None, scored: Scored | None) -> Launched:
        return Done(first, window, scored)

    def _indices(self, indices: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return upload(indices, self._last.device)


def _ends(step: Step) -> NDArray[np.int64]:
    """Of the pass's tokens, those from which others follow: all of the window's, and the last of prompts that end."""
    rows = len(step.lengths)
    stops = rows + np.cumsum([len(chunk.ids) for chunk in step.prefills])
    last = [chunk.last for chunk in step.prefills]
    return np.concatenate([np.arange(rows), stops[last] - 1])


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
    quantize: Quantize | None = None,
) -> Executor:
    """The decoder in `folder`, ready to run. `slots` and `max_length` that are None are chosen (see `kv_pages.fit`).

    `budget_bytes` is what keys, values and adapters may take (see `kv_pages.allowed_bytes`), `arena_bytes` what they do
    take, if that is more than all slots' texts need, and `most_rank` the greatest rank of an adapter; 0 for none. With
    `quantize` weights are kept as `int8` or `fp8` say, and with fp8 keys and values, too.

    On CPUs this sets the whole process's number of torch threads to `threads`: a process serves one decoder. Raises
    ModelError if the folder holds no decoder that is supported, KVMemoryError if the slots do not fit, OldGpuError for
    a GPU without fp8, and ValueError for a max_length beyond the model's.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    weights = SavedWeights(folder, DTYPES[dtype], torch.device(device), quantize=quantize)
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
    kernels, kind = kernels_for(weights.device, threads, weights.quantize)
    kv = pages_for(weights, kernels, slots, max_length, budget_bytes, arena_bytes)
    with torch.inference_mode():
        sampler = Sampler(kv.slots, weights.whole.vocab, weights.device, kv.max_length)
        return kind(Decoder(weights, kernels, kv), sampler, most_rank)


@torch.inference_mode()
def pages_for(
    weights: DecoderWeights,
    kernels: DecoderKernels,
    slots: int | None,
    max_length: int | None,
    budget_bytes: int | None,
    arena_bytes: int | None,
) -> KVPages:
    """Pages of the size that `build` describes, before the weights are read. Of budget and arena each rank has a part,
    as it has of a CPU's memory, which all ranks share."""
    shape, dtype, device, ranks = weights.shape, weights.dtype, weights.device, weights.ranks
    in_common = device.type == "cpu"
    sharing = ranks if in_common else 1
    allowed = allowed_bytes(device, budget_bytes and budget_bytes * sharing // ranks, weights.nbytes * sharing)
    allowed //= sharing
    slots, max_length = fit(shape, slots, max_length, weights.kv_dtype, allowed)
    arena = arena_bytes and arena_bytes // ranks
    return KVPages(shape, slots, max_length, dtype, device, kernels, allowed, arena, weights.kv_dtype)


def kernels_for(
    device: torch.device, threads: int, quantize: Quantize | None = None
) -> tuple[DecoderKernels, type[Executor]]:
    """What computes there, and the executor of a process that computes a whole decoder with it.

    On CPUs only `TorchKernels` read keys and values of fp8. Raises OldGpuError for a GPU that does not.
    """
    return _on_cuda(device, quantize) if device.type == "cuda" else _on_cpu(threads, quantize)


def _on_cpu(threads: int, quantize: Quantize | None) -> tuple[DecoderKernels, type[Executor]]:
    torch.set_num_threads(threads)
    return TorchKernels() if quantize == "fp8" else cpu_kernels.best(threads), Executor


def _on_cuda(device: torch.device, quantize: Quantize | None) -> tuple[DecoderKernels, type[Executor]]:
    """Imports what needs Triton, which is not there on every machine without a GPU."""
    if quantize == "fp8":
        fp8.check(device)
    triton_cache.keep()
    from pliant.kernels.decoder.cuda_executor import CudaExecutor
    from pliant.kernels.decoder.cuda_kernels import CudaKernels

    return CudaKernels(), CudaExecutor
