"""Numbers of fp8 in wider dtypes on a GPU, in Triton, faster than a GPU's own instructions."""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from pliant.kernels.decoder import fp8

LARGEST = tl.constexpr(fp8.LARGEST)


def widens_by_hand() -> bool:
    """Whether kernels may be told to: Triton's interpreter knows no such instructions."""
    return not triton.knobs.runtime.interpret


@triton.jit
def widened(x: tl.tensor, dtype: tl.constexpr, by_hand: tl.constexpr) -> tl.tensor:
    """`x`, of fp8 or anything else, in `dtype`; what is not a number in fp8 becomes 480 or -480 in bfloat16.

    From fp8 to bfloat16 GPUs convert in four instructions, which takes longer than memory does. Here five make two
    numbers: a bfloat16 has the same bits behind a longer exponent, and is to be multiplied by 2**120.
    """
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16 and by_hand:
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 two, moved, scale, nothing;
            mov.b32 scale, 0x7B807B80;
            mov.b32 nothing, 0x80008000;
            prmt.b32 two, $2, 0, 0x1404;
            shr.b32 moved, two, 4;
            and.b32 moved, moved, 0x07F007F0;
            lop3.b32 two, two, nothing, moved, 0xEA;
            fma.rn.bf16x2 $0, two, scale, nothing;
            prmt.b32 two, $2, 0, 0x3424;
            shr.b32 moved, two, 4;
            and.b32 moved, moved, 0x07F007F0;
            lop3.b32 two, two, nothing, moved, 0xEA;
            fma.rn.bf16x2 $1, two, scale, nothing;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = x.to(dtype)
    return wide


@triton.jit
def stored(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """As `fp8.stored_as`."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST)
    return x.to(dtype)
