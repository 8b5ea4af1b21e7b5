"""An executor whose decoder several processes compute together, each with a share of the weights (tensor parallel).

The engine sees one executor, rank 0's. It orders of the others what it does itself (`crew`); a step goes to them with
the tokens it begins with, and all ranks then compute it in step, adding up after attention and after the MLP (`model`).
Sampling is rank 0's alone. Pages and adapters lie at the same places in the arenas of all ranks, so that one count of
bytes, that of a rank, holds for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.formats.adapter_info import AdapterInfo
from pliant.kernels.decoder import adapter_weights, executor
from pliant.kernels.decoder.crew import Crew, Setting
from pliant.kernels.decoder.decode_step import Step
from pliant.kernels.decoder.executor import DTYPES, Computed, Executor, kernels_for, pages_for
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.sampling import Sampler, Sampling
from pliant.kernels.decoder.weights import SavedWeights
from pliant.models.decoder_shape import Quantize

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_GREEDY = Sampling(temperature=0.0)


class ParallelExecutor(Executor):
    """An `Executor` in front of the ranks of `crew`. Its bytes, of pages, arena and adapters, are those of each rank.

    Every method raises RankError when a rank ended or did not answer, and from then on.
    """

    def __init__(self, decoder: Decoder, sampler: Sampler, most_rank: int, crew: Crew) -> None:
        super().__init__(decoder, sampler, most_rank)
        self._crew = crew

    def stage(self, adapter: AdapterInfo) -> Tensor:
        """As `Executor.stage`; a row for each rank, [ranks, values]."""
        kv, count = self._decoder.kv, self._crew.ranks.count
        rows = [
            adapter_weights.stage(adapter, self.shape, kv.arena.dtype, kv.arena.device, rank, count)
            for rank in range(count)
        ]
        return torch.stack(rows)

    def install(self, key: str, ranks: Sequence[int], blob: Tensor) -> None:
        own, *others = blob
        super().install(key, ranks, own)
        with self._crew.watched():
            self._crew.order("install", key, tuple(ranks), len(own), own.dtype)
            for rank, theirs in enumerate(others, 1):
                self._crew.ranks.send(theirs, rank)

    def remove(self, key: str) -> None:
        super().remove(key)
        self._order("remove", key)

    def keep_pages(self, count: int) -> None:
        super().keep_pages(count)
        self._order("keep_pages", count)

    def admit(
        self,
        slot: int,
        sampling: Sampling,
        adapter: str | None = None,
        prompt: NDArray[np.int32] = _NO_IDS,
        answer: NDArray[np.int32] = _NO_IDS,
    ) -> None:
        super().admit(slot, sampling, adapter, prompt, answer)
        self._order("admit", slot, _GREEDY, adapter)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        super().move(moves)
        self._order("move", moves)

    def move_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        super().move_pages(moves)
        self._order("move_pages", moves)

    def _computed(self, step: Step) -> Computed:
        tokens = self._window(step)
        with self._crew.watched():
            self._crew.order("compute", step._replace(masks=None, prefill_masks=None), tokens.cpu().numpy())
            return self.compute(step, tokens)

    def _order(self, method: str, *arguments: object) -> None:
        with self._crew.watched():
            self._crew.order(method, *arguments)


def load(
    folder: Path,
    ranks: int,
    limit_s: float,
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
    """As `executor.load`, on `ranks` processes of `threads` each, this one among them; on GPUs each has its own.

    Budget and arena are for all of them together. A rank that does not answer for `limit_s` ends the executor.

    Raises ValueError if the model cannot be shared by so many, and RankError if a rank fails.
    """
    if ranks == 1:
        return executor.load(
            folder, slots, max_length, dtype, device, threads, budget_bytes, arena_bytes, most_rank, quantize
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    at = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    weights = SavedWeights(folder, DTYPES[dtype], at, 0, ranks, quantize)
    kernels, _ = kernels_for(at, threads, quantize)
    kv = pages_for(weights, kernels, slots, max_length, budget_bytes, arena_bytes)
    sizes = kv.slots, kv.max_length, kv.arena.nbytes, most_rank, ranks
    crew = Crew(Setting(folder, dtype, quantize, device, threads, *sizes, limit_s))
    with torch.inference_mode(), crew.watched():
        decoder = Decoder(weights, kernels, kv, crew.ranks)
        sampler = Sampler(kv.slots, weights.whole.vocab, at, kv.max_length)
        crew.ready()
        return ParallelExecutor(decoder, sampler, most_rank, crew)
