"""Linear layers on a GPU, in Triton: products of a few rows, as fast as memory gives a weight.

A decode step reads each weight once for all its rows. The work is cut by outputs, and by inputs too where these alone
are too few programs to keep a GPU's memory busy (split-K): each program leaves what its inputs give, and the last to
arrive adds up what all have left, in the order of the inputs, whoever it is. So a result is always the same, and up to
`FEW` rows it does not depend on what else is in the batch. Weights narrower than the rows are widened on the way, and
sums are scaled, get their bias and are gated before they are written (W8A16). Sums are of float32.
"""
# mypy: disallow-untyped-decorators=False

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pliant.kernels.decoder import triton_overlap
from pliant.kernels.decoder.triton_decode import gate, silu_times
from pliant.kernels.decoder.triton_fp8 import widened, widens_by_hand
from pliant.kernels.decoder.triton_overlap import FEW, take_turn

_LEAST = 16  # rows that a program takes: a GPU's matrix product takes as many at least
_MANY = 128  # rows that a program takes at most
_MOST_PROGRAMS = 4  # of a launch, for each processor


class Tile(NamedTuple):
    """What a program takes: so many outputs, and at a time so many of their inputs, `stages` of which are under way."""

    outs: int
    ins: int
    stages: int
    warps: int
    programs: int
    """Of a launch, for each processor."""
    turned: bool
    """Whether weights are the left side of the product, of which matrix units take 64 at a time, and rows the right."""


def tile_of(rows: int, itemsize: int) -> Tile:
    """That of programs that take so many rows at a time, and weights of so many bytes: the fastest on an H200 of
    those that fit into the 99 KB that a program has on smaller GPUs."""
    if itemsize == 4:
        return Tile(64, 64, 3, 4, 4, False)
    if itemsize == 2:
        return Tile(64, 128, 4, 4, 2, True)
    if rows == _LEAST:
        return Tile(64, 256, 3, 4, 4, False)
    return Tile(128, 64, 4, 4, 2, True) if rows == _MANY else Tile(64, 128, 3, 4, 3, True)


class TritonLinear:
    """A `Linear` whose `weight` [out, in] is in the dtype of the rows, or int8 or float8_e4m3fn with a `scale` [out].

    `scale` is float32, and the bias as the rows. Inputs are shared among so many programs that a launch has about as
    many as a GPU of `processors` has in flight. Launches can be recorded in CUDA graphs, and must not overlap.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None, processors: int) -> None:
        self._weight = weight
        self._scale = scale
        self._bias = bias
        self._processors = processors
        self._arrived = torch.zeros(_MOST_PROGRAMS * processors, dtype=torch.int32, device=weight.device)
        """By tile of the result: how many of its programs are done; 0 between launches."""

    def __call__(self, x: Tensor) -> Tensor:
        if self._scale is None and len(x) > FEW:
            return functional.linear(x, self._weight, self._bias)
        return self._multiply(x, gates=False)

    def gated(self, x: Tensor) -> Tensor:
        """What `DecoderKernels.gate` makes of the result, [n, out / 2]."""
        if self._scale is None and len(x) > FEW:
            return gate(self(x))
        return self._multiply(x, gates=True)

    def _multiply(self, x: Tensor, gates: bool) -> Tensor:
        rows, (outs, ins) = len(x), self._weight.shape
        tile_rows = min(_MANY, max(_LEAST, triton.next_power_of_2(rows)))
        tile = tile_of(tile_rows, self._weight.element_size())
        tiles = triton.cdiv(rows, tile_rows), triton.cdiv(outs, tile.outs)
        splits, share = self._shares(tiles[0] * tiles[1], tile)
        y = x.new_empty(rows, outs // 2 if gates else outs)
        parts = x.new_empty((*tiles, splits, tile_rows, tile.outs) if splits > 1 else 1, dtype=torch.float32)
        _linear[*tiles, splits](
            x,
            self._weight,
            self._weight if self._scale is None else self._scale,
            self._weight if self._bias is None else self._bias,
            y,
            parts,
            self._arrived,
            rows,
            ins,
            outs,
            share,
            scales=self._scale is not None,
            biases=self._bias is not None,
            gates=gates,
            tile_rows=tile_rows,
            tile_outs=tile.outs,
            tile_ins=tile.ins,
            turned=tile.turned,
            by_hand=widens_by_hand(),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **triton_overlap.options(rows),
        )
        return y

    def _shares(self, tiles: int, tile: Tile) -> tuple[int, int]:
        """Among how many programs the inputs of each of so many tiles are shared, and how many steps each takes."""
        steps = triton.cdiv(self._weight.shape[1], tile.ins)
        share = triton.cdiv(steps, max(1, tile.programs * self._processors // tiles))
        return triton.cdiv(steps, share), share


@triton.jit(do_not_specialize=["rows", "share"])
def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    ins: tl.tensor,
    outs: tl.tensor,
    share: tl.tensor,
    scales: tl.constexpr,
    biases: tl.constexpr,
    gates: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outs: tl.constexpr,
    tile_ins: tl.constexpr,
    turned: tl.constexpr,
    by_hand: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """A tile of the result, or what a share of the inputs adds to it. If it `gates`, outputs are taken in pairs."""
    take_turn(overlaps)
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_outs + tl.arange(0, tile_outs)
    is_out = column < outs
    out = column // 2 + column % 2 * (outs // 2) if gates else column
    from_x = x + row.to(tl.int64)[:, None] * ins
    from_weight = weight + out.to(tl.int64)[None, :] * ins
    sums = tl.zeros([tile_outs, tile_rows] if turned else [tile_rows, tile_outs], tl.float32)
    first = tl.program_id(2) * share
    for step in range(first, tl.minimum(first + share, tl.cdiv(ins, tile_ins))):
        at = step * tile_ins + tl.arange(0, tile_ins)
        is_in = at < ins
        some = tl.load(from_x + at[None, :], mask=(row < rows)[:, None] & is_in[None, :], other=0.0)
        weights = tl.load(from_weight + at[:, None], mask=is_in[:, None] & is_out[None, :], other=0.0)
        weights = widened(weights, some.dtype, by_hand)
        if turned:
            sums = tl.dot(tl.trans(weights), tl.trans(some), sums, input_precision="ieee")
        else:
            sums = tl.dot(some, weights, sums, input_precision="ieee")
    if turned:
        sums = tl.trans(sums)
    splits = tl.num_programs(2)
    is_last = splits == 1
    if splits > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        places = tl.arange(0, tile_rows)[:, None] * tile_outs + tl.arange(0, tile_outs)[None, :]
        to = parts + tile * splits * tile_rows * tile_outs + places
        tl.store(to + tl.program_id(2) * tile_rows * tile_outs, sums, mask=(row < rows)[:, None])
        tl.debug_barrier()  # all threads have stored before one tells
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrived + tile, 0)
            sums = tl.zeros([tile_rows, tile_outs], tl.float32)
            for split in range(splits):
                part = to + split * tile_rows * tile_outs
                sums += tl.load(part, mask=(row < rows)[:, None], other=0.0, cache_modifier=".cg")
    if is_last:
        _finish(sums, scale, bias, y, row, column, out, rows, outs, scales, biases, gates)


@triton.jit
def _finish(
    sums: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    scales: tl.constexpr,
    biases: tl.constexpr,
    gates: tl.constexpr,
) -> None:
    """Write a tile that is summed up."""
    if scales:
        sums *= tl.load(scale + out, mask=column < outs, other=0.0)[None, :]
    if biases:
        sums += tl.load(bias + out, mask=column < outs, other=0.0).to(tl.float32)[None, :]
    rounded = sums.to(y.dtype.element_ty)
    width = outs
    if gates:
        gate, up = tl.split(tl.reshape(rounded, [rounded.shape[0], rounded.shape[1] // 2, 2]))
        rounded = silu_times(gate, up)
        width = outs // 2
        column = tl.program_id(1) * rounded.shape[1] + tl.arange(0, rounded.shape[1])
    to = y + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(to, rounded, mask=(row < rows)[:, None] & (column < width)[None, :])
