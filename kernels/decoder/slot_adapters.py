"""Which adapter each slot uses, and where those that are installed lie: what a step looks up at its launch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.decoder.adapter_pool import AdapterPool, PoolError
from pliant.kernels.decoder.decode_step import Step
from pliant.kernels.decoder.lora import LoraBatch, LoraGroup, rows_of
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import LoraLayout


class SlotAdapters:
    """Adapters of up to `most_rank` in `arena`, behind what is kept for slots: all of it at first.

    A slot may go on naming an adapter that was removed, as a slot that nobody uses does; no step computes with it.
    """

    def __init__(self, shape: DecoderShape, slots: int, arena: Tensor, most_rank: int) -> None:
        self.most_rank = most_rank
        self._shape = shape
        self._arena = arena
        self._pool = AdapterPool(arena)
        self._pool.keep(len(arena))
        self._layouts: dict[str, LoraLayout] = {}
        self._keys: list[str | None] = [None] * slots

    def keep(self, values: int) -> None:
        """From now on the first `values` belong to slots. Raises PoolError if adapters do not fit behind them."""
        self._pool.keep(values)

    def install(self, key: str, ranks: Sequence[int], blob: Tensor) -> set[str]:
        """Copy `blob`, an adapter of `ranks` as `adapter_weights.stage` gives it, to a place of its own. Returns what
        was copied to another place: it, and those that moved for it.

        Raises PoolError if there is no room or `key` is installed, and ValueError if the blob or its ranks are wrong.
        """
        layout = LoraLayout(self._shape, ranks)
        if max(ranks) > self.most_rank or len(blob) != layout.values:
            raise ValueError(
                f"adapter {key}: ranks {', '.join(map(str, ranks))} need {layout.values:,} values and must be at most "
                f"{self.most_rank}; its blob has {len(blob):,}"
            )
        before = {other: self._pool.offset(other) for other in self._layouts}
        self._pool.place(key, blob)
        self._layouts[key] = layout
        return {key, *(other for other, offset in before.items() if offset != self._pool.offset(other))}

    def remove(self, key: str) -> None:
        """Give back the place of an adapter. Raises KeyError if it is not installed."""
        self._pool.remove(key)
        del self._layouts[key]

    def assign(self, slot: int, key: str | None) -> None:
        """From the next launch on, `slot` uses this adapter, or none. Raises PoolError if it is not installed."""
        if key is not None and key not in self._layouts:
            raise PoolError(f"slot {slot} cannot use adapter {key}, which is not installed")
        self._keys[slot] = key

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Take the adapter of each source slot to its target."""
        for source, target in moves:
            self._keys[target] = self._keys[source]

    def check(self, step: Step) -> None:
        """Raise PoolError if a slot, whose tokens are to be computed, uses an adapter that was removed."""
        live = (np.flatnonzero(step.lengths) + step.offset).tolist()
        for slot in (*live, *(prefill.slot for prefill in step.prefills)):
            key = self._keys[slot]
            if key is not None and key not in self._layouts:
                raise PoolError(f"slot {slot} uses adapter {key}, which was removed while a request needed it")

    def of_step(self, step: Step) -> LoraBatch | None:
        """For a row for each slot of its window, and behind them as many for each prefill as it has tokens.

        A row that has nothing stored is a hole and uses no adapter.
        """
        keys = self.keys_of(step)
        if not any(keys):
            return None
        return self._batch(rows_of(keys, [1] * len(step.lengths) + [len(prefill.ids) for prefill in step.prefills]))

    def keys_of(self, step: Step) -> list[str | None]:
        """By row of its window, and then by prefill: the adapter that it is computed with."""
        window = self._keys[step.offset : step.offset + len(step.lengths)]
        keys = [key if length else None for key, length in zip(window, step.lengths.tolist(), strict=True)]
        return keys + [self._keys[prefill.slot] for prefill in step.prefills]

    def _batch(self, rows: dict[str, NDArray[np.int32]]) -> LoraBatch:
        groups = [LoraGroup(at, self._pool.offset(key), self._layouts[key]) for key, at in rows.items()]
        return LoraBatch(self._arena, groups)
