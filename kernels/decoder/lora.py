"""Which rows of a batch use which LoRA adapter, and where these lie: what kernels need to add them (Chameleon §4.1).

Rows are grouped by adapter, so that a batch of many reads each adapter once and pads none to the rank of another; rows
without an adapter are in no group and cost nothing.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pliant.models.lora_layout import SITES, LoraLayout, SiteLayout

MOST_MODULES = 3
FIELDS = 2 + 2 * MOST_MODULES
"""Numbers that say where a site of an adapter lies, see `LoraBatch.places`."""


class LoraGroup(NamedTuple):
    """The rows of a batch, rising, that use one adapter, whose blob lies at `offset` (in values) of the arena."""

    rows: NDArray[np.int32]
    offset: int
    layout: LoraLayout


def rows_of(keys: Iterable[str | None], sizes: Iterable[int]) -> dict[str, NDArray[np.int32]]:
    """The rows of each adapter, rising, where the i-th of `keys` is that of the next `sizes[i]` rows."""
    found: dict[str, list[range]] = {}
    first = 0
    for key, size in zip(keys, sizes, strict=True):
        if key is not None:
            found.setdefault(key, []).append(range(first, first + size))
        first += size
    return {key: np.fromiter(chain.from_iterable(ranges), np.int32) for key, ranges in found.items()}


class LoraBatch:
    """The rows of one pass through the decoder that use adapters, at least one; adapters lie in `arena`.

    A batch holds for one launch, as adapters may be moved or removed before the next.
    """

    def __init__(self, arena: Tensor, groups: Sequence[LoraGroup]) -> None:
        self.arena = arena
        self.groups = tuple(groups)

    @property
    def sites(self) -> dict[str, SiteLayout]:
        """The sizes of every site; their ranks are those of the first group alone."""
        return self.groups[0].layout.sites

    @cached_property
    def outs(self) -> NDArray[np.int64]:
        """The outputs of each site's modules, [sites, MOST_MODULES]; 0 for modules that it does not have."""
        outs = np.zeros((len(SITES), MOST_MODULES), np.int64)
        for row, site in zip(outs, self.sites.values(), strict=True):
            row[: len(site.modules)] = [module.out for module in site.modules]
        return outs

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """The rows of all groups, group by group."""
        return np.concatenate([group.rows for group in self.groups])

    @cached_property
    def starts(self) -> NDArray[np.int32]:
        """Where each group begins in `rows`, and where the last one ends; [groups + 1]."""
        return np.cumsum([0, *(len(group.rows) for group in self.groups)], dtype=np.int32)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """For kernels: where each group's adapter lies, [groups, sites, FIELDS].

        The fields are the values from one layer to the next, where A of layer 0 begins in the arena, and for each
        module its rank and where its B of layer 0 begins; a module that a site does not have has rank 0.
        """
        places = np.zeros((len(self.groups), len(SITES), FIELDS), np.int64)
        for group, table in zip(self.groups, places, strict=True):
            for row, site in zip(table, group.layout.sites.values(), strict=True):
                modules = [(module.rank, group.offset + module.b) for module in site.modules]
                numbers = [group.layout.block, group.offset + site.a, *chain.from_iterable(modules)]
                row[: len(numbers)] = numbers
        return places
