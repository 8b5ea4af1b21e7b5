"""Linear layers on a GPU whose weights are fp8, in Triton: converted on their way to the product, never kept wide."""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

_LEAST, _MOST = 16, 128
"""Rows of a program."""
_TILE_BYTES = 128
"""Of a row of `x` that a program takes at a time."""


def linear(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in] @ values.T [in, out] * scale + bias, summed in float32, for `fp8.quantized` values. All contiguous."""
    rows, ins = x.shape
    out = x.new_empty(rows, len(values))
    block_rows = min(_MOST, max(_LEAST, triton.next_power_of_2(rows)))
    block_outs = 64 if block_rows < _MOST else 128
    grid = triton.cdiv(rows, block_rows), triton.cdiv(len(values), block_outs)
    _linear[grid](
        x,
        values,
        scale,
        scale if bias is None else bias,
        out,
        rows,
        ins,
        len(values),
        biased=bias is not None,
        block_rows=block_rows,
        block_outs=block_outs,
        block_ins=_TILE_BYTES // x.element_size(),
        num_warps=4 if block_rows < _MOST else 8,
        num_stages=3,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    ins: tl.tensor,
    outs: tl.tensor,
    biased: tl.constexpr,
    block_rows: tl.constexpr,
    block_outs: tl.constexpr,
    block_ins: tl.constexpr,
) -> None:
    """Programs of the same outputs run side by side, so that a weight is read from memory once."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_outs + tl.arange(0, block_outs)
    in_rows, in_outs = row < rows, column < outs
    from_x = x + row.to(tl.int64)[:, None] * ins
    from_values = values + column.to(tl.int64)[None, :] * ins
    product = tl.zeros([block_rows, block_outs], tl.float32)
    for begin in range(0, ins, block_ins):
        at = begin + tl.arange(0, block_ins)
        inside = at < ins
        given = tl.load(from_x + at[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
        weight = tl.load(from_values + at[:, None], mask=inside[:, None] & in_outs[None, :], other=0.0)
        product += tl.dot(given, weight.to(given.dtype), input_precision="ieee")
    product *= tl.load(scale + column, mask=in_outs, other=0.0)[None, :]
    if biased:
        product += tl.load(bias + column, mask=in_outs, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * outs + column[None, :]
    tl.store(to, product.to(out.dtype.element_ty), mask=in_rows[:, None] & in_outs[None, :])
