"""What LoRA adapters add to a linear layer on a GPU, in Triton: y += B A x in tiles of rows that share one adapter.

Which rows a tile has and where its adapter lies is read from tables on the GPU, so that one recorded CUDA graph serves
every batch: its grid is that of the most tiles there can be, and those without rows or ranks end at once. Each tile
goes through its own ranks and no more (Chameleon §4.1 has adapters of many ranks in one batch).
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.decoder.lora import FIELDS, MOST_MODULES, LoraBatch
from pliant.kernels.upload import upload
from pliant.models.lora_layout import SITES, SiteLayout

TILE_ROWS = 16
"""What a matrix product on a GPU takes at least."""
_RANKS = 32
_INPUTS = 128
_OUTS = 128
_LONGEST_SHARE = 1024  # inputs that one program sums up
_NO_ROW = -1
_INDICES = {site: index for index, site in enumerate(SITES)}

Tables = tuple[NDArray[np.int32], NDArray[np.int64]]
"""The rows of each tile, [tiles, TILE_ROWS], -1 where it has none, and its adapter's `LoraBatch.places`."""


@dataclass(frozen=True)
class LoraTiles:
    """A batch as the GPU finds it: `rows` and `places` are `Tables` there, and may be filled anew for every launch.

    `sites` gives the sizes of the decoder's linear layers, and no adapter of the batch has a rank above `most_rank`.
    """

    arena: Tensor
    sites: dict[str, SiteLayout]
    most_rank: int
    rows: Tensor
    places: Tensor

    def add(self, y: Tensor, x: Tensor, layer: int, site: str) -> None:
        """See `AddLora`; launches two kernels, whatever the tables say."""
        sizes = self.sites[site]
        tiles, width, splits = len(self.rows), len(sizes.modules) * self.most_rank, _splits(sizes.inputs)
        outs = [module.out for module in sizes.modules] + [0] * (MOST_MODULES - len(sizes.modules))
        inner = x.new_empty(splits, tiles * TILE_ROWS, width, dtype=torch.float32)
        tables = self.arena, self.rows, self.places, inner, layer, _INDICES[site]
        options = {"sites": len(SITES), "fields": FIELDS, "tile_rows": TILE_ROWS, "splits": splits, "num_warps": 4}
        _shrink[tiles, triton.cdiv(width, _RANKS), splits](
            x, *tables, sizes.inputs, width, block_ranks=_RANKS, block_inputs=_INPUTS, **options
        )
        blocks = sum(triton.cdiv(out, _OUTS) for out in outs)
        _expand[tiles, blocks](y, *tables, *outs, width, block_ranks=_RANKS, block_outs=_OUTS, **options)


def tiles_of(batch: LoraBatch) -> LoraTiles:
    """A batch on the GPU, in as few tiles as it takes."""
    rows, places = tables_of(batch)
    most_rank = rounded(max(max(group.layout.ranks) for group in batch.groups))
    device = batch.arena.device
    return LoraTiles(batch.arena, batch.sites, most_rank, upload(rows, device), upload(places, device))


def tables_of(batch: LoraBatch | None, tiles: int = 0) -> Tables:
    """The tables of a batch, filled up to `tiles` tiles with those that have nothing to do."""
    groups = zip(batch.groups, batch.places, strict=True) if batch else ()
    of_tiles = [
        (group.rows[first : first + TILE_ROWS], place)
        for group, place in groups
        for first in range(0, len(group.rows), TILE_ROWS)
    ]
    count = max(tiles, len(of_tiles))
    rows = np.full((count, TILE_ROWS), _NO_ROW, np.int32)
    places = np.zeros((count, len(SITES), FIELDS), np.int64)
    for tile, (members, place) in enumerate(of_tiles):
        rows[tile, : len(members)] = members
        places[tile] = place
    return rows, places


def rounded(rank: int) -> int:
    """The next rank that blocks of ranks fill: kernels are compiled anew for sizes that are not multiples of 16."""
    return -(-max(rank, 1) // _RANKS) * _RANKS


def _splits(inputs: int) -> int:
    """Among how many programs the inputs of a row are shared, a power of two."""
    shares = -(-inputs // _LONGEST_SHARE)
    return 1 << (shares - 1).bit_length()


@triton.jit(do_not_specialize=["layer", "site"])
def _shrink(
    x: tl.tensor,
    arena: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    inner: tl.tensor,
    layer: tl.tensor,
    site: tl.tensor,
    inputs: tl.tensor,
    width: tl.tensor,
    sites: tl.constexpr,
    fields: tl.constexpr,
    tile_rows: tl.constexpr,
    splits: tl.constexpr,
    block_ranks: tl.constexpr,
    block_inputs: tl.constexpr,
) -> None:
    """A x for the rows of one tile, some ranks, and one share of the inputs; [splits, rows of tiles, width]."""
    tile = tl.program_id(0)
    split = tl.program_id(2)
    place = places + (tile * sites + site) * fields
    rank = tl.load(place + 2) + tl.load(place + 4) + tl.load(place + 6)
    ranks = tl.program_id(1) * block_ranks + tl.arange(0, block_ranks)
    if tl.program_id(1) * block_ranks < rank:
        lanes = tl.arange(0, tile_rows)
        row = tl.load(rows + tile * tile_rows + lanes).to(tl.int64)
        a = arena + tl.multiple_of(tl.load(place + 1) + layer * tl.load(place), 16)
        share = tl.cdiv(tl.cdiv(inputs, splits), block_inputs) * block_inputs
        start = split * share
        sums = tl.zeros([tile_rows, block_ranks], tl.float32)
        for first in range(start, tl.minimum(start + share, inputs), block_inputs):
            columns = first + tl.arange(0, block_inputs)
            inside = columns < inputs
            from_x = tl.load(
                x + row[:, None] * inputs + columns[None, :], mask=(row >= 0)[:, None] & inside[None, :], other=0.0
            )
            from_a = tl.load(
                a + ranks[None, :] * inputs + columns[:, None],
                mask=(ranks < rank)[None, :] & inside[:, None],
                other=0.0,
            )
            sums = tl.dot(from_x, from_a, sums, input_precision="ieee")
        to = ((split * tl.num_programs(0) + tile) * tile_rows + lanes).to(tl.int64) * width
        tl.store(inner + to[:, None] + ranks[None, :], sums, mask=(ranks < rank)[None, :])


@triton.jit(do_not_specialize=["layer", "site"])
def _expand(
    y: tl.tensor,
    arena: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    inner: tl.tensor,
    layer: tl.tensor,
    site: tl.tensor,
    out_0: tl.tensor,
    out_1: tl.tensor,
    out_2: tl.tensor,
    width: tl.tensor,
    sites: tl.constexpr,
    fields: tl.constexpr,
    tile_rows: tl.constexpr,
    splits: tl.constexpr,
    block_ranks: tl.constexpr,
    block_outs: tl.constexpr,
) -> None:
    """y += B (A x) for the rows of one tile and some outputs of one module."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    blocks_0 = tl.cdiv(out_0, block_outs)
    blocks_1 = tl.cdiv(out_1, block_outs)
    module = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    block -= tl.where(module > 0, blocks_0, 0) + tl.where(module > 1, blocks_1, 0)
    before = tl.where(module > 0, out_0, 0) + tl.where(module > 1, out_1, 0)
    out = tl.where(module == 0, out_0, tl.where(module == 1, out_1, out_2))

    place = places + (tile * sites + site) * fields
    rank = tl.load(place + 2 + 2 * module)
    if rank > 0:
        skipped = tl.where(module > 0, tl.load(place + 2), 0) + tl.where(module > 1, tl.load(place + 4), 0)
        b = arena + tl.multiple_of(tl.load(place + 3 + 2 * module) + layer * tl.load(place), 16)
        lanes = tl.arange(0, tile_rows)
        row = tl.load(rows + tile * tile_rows + lanes).to(tl.int64)
        columns = block * block_outs + tl.arange(0, block_outs)
        inside = columns < out
        sums = tl.zeros([tile_rows, block_outs], tl.float32)
        for first in range(0, rank, block_ranks):
            ranks = first + tl.arange(0, block_ranks)
            in_rank = ranks < rank
            mixed = tl.zeros([tile_rows, block_ranks], tl.float32)
            for split in range(splits):
                at = ((split * tl.num_programs(0) + tile) * tile_rows + lanes).to(tl.int64) * width + skipped
                mixed += tl.load(inner + at[:, None] + ranks[None, :], mask=in_rank[None, :], other=0.0)
            from_b = tl.load(
                b + ranks[:, None] * out + columns[None, :], mask=in_rank[:, None] & inside[None, :], other=0.0
            )
            sums = tl.dot(mixed.to(from_b.dtype), from_b, sums, input_precision="ieee")
        to = y + row[:, None] * (out_0 + out_1 + out_2) + before + columns[None, :]
        mask = (row >= 0)[:, None] & inside[None, :]
        tl.store(to, (tl.load(to, mask=mask, other=0.0).to(tl.float32) + sums).to(y.dtype.element_ty), mask=mask)
