"""Launches that begin before the one before them is done, on GPUs that can (programmatic dependent launch).

A decode step is a chain of short launches, and a GPU that begins each of them when the one before has ended is idle for
microseconds hundreds of times. So each kernel says as it begins that the next may begin, too, and waits for the one
before it to be done before it reads what others write, or writes anything. As every one waits, whoever is done has
everything before it done. A kernel that does neither, as torch's, begins and ends alone. Steps of more than `FEW` rows
leave matrix products to these, and there each of our launches would only take a microsecond longer.
"""
# mypy: disallow-untyped-decorators=False

import functools
from typing import Any

import triton
import triton.language as tl

FEW = 16
"""Rows of a step up to which its launches overlap, and linear layers are ours (see `triton_linear`)."""
ASKED_BYTES = 16
"""Of which GPUs are asked for whole numbers."""
_CAPABILITY = 90


def options(rows: int) -> dict[str, Any]:
    """How kernels that take their turn are launched for so many rows: what they are given beside their arguments."""
    if rows > FEW or triton.knobs.runtime.interpret or not _can_overlap(triton.runtime.driver.active):
        return {"overlaps": False}
    return {"overlaps": True, "launch_pdl": True}


@functools.cache
def _can_overlap(driver: Any) -> bool:
    target = driver.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= _CAPABILITY)


@triton.jit
def take_turn(overlaps: tl.constexpr) -> None:
    """Comes first in a kernel, but for what it does with numbers that no other launch writes."""
    let_next_begin(overlaps)
    wait(overlaps)


@triton.jit
def let_next_begin(overlaps: tl.constexpr) -> None:
    """The first half of `take_turn`."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(overlaps: tl.constexpr) -> None:
    """The second half of `take_turn`: all launches before this one are done."""
    if overlaps:
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for(numbers: tl.tensor, count: tl.tensor) -> None:
    """Have a GPU that can `take_turn` bring `count` numbers from each of these addresses to where they are nearer.

    What another launch may be writing can be asked for, too. Addresses and bytes are multiples of `ASKED_BYTES`.
    """
    size = tl.zeros(numbers.shape, tl.int32) + count * (numbers.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [numbers.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
