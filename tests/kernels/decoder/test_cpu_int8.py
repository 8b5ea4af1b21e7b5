"""int8 layers in C give what exact sums of whole numbers give, on every instruction that a CPU may have for them."""

import platform

import pytest
import torch
from support.cpu_builds import BUILDS
from torch import Tensor

from pliant.kernels import c_compiler
from pliant.kernels.c_compiler import THIS_MACHINE
from pliant.kernels.decoder.cpu_kernels import CpuKernels
from pliant.kernels.decoder.int8 import quantized
from pliant.kernels.decoder.kernels import DecoderKernels, TorchKernels

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(96, 64), (50, 37), (16, 32), (100, 128), (1, 4), (161, 300)]
"""(outs, ins)"""
OF_C = dict(BUILDS)
if platform.machine() == "x86_64":
    OF_C["without AVX-512"] = (*THIS_MACHINE, "-mno-avx512f")
    OF_C["without VNNI"] = (*THIS_MACHINE, "-mno-avx512vnni", "-mno-avxvnni")
    OF_C["plain C"] = ("-march=x86-64", "-U__SSE2__")

pytestmark = pytest.mark.skipif(c_compiler.compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module", params=["torch", *OF_C])
def kernels(request: pytest.FixtureRequest) -> DecoderKernels:
    if request.param == "torch":
        return TorchKernels()
    return CpuKernels(2, OF_C[request.param])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def exactly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float64 [n, out]"""
    rows, kept = quantized(x), quantized(weight)
    sums = rows.values.long() @ kept.values.long().T
    product = sums * rows.scale.double()[:, None] * kept.scale.double()
    return product if bias is None else product + bias.double()


def near(ours: Tensor, expected: Tensor) -> None:
    """Within the rounding of the result."""
    least = float(expected.abs().max()) * 1e-6
    tolerance = 1e-6 if ours.dtype is torch.float32 else 2**-8
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=least)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 300])
@pytest.mark.parametrize(("outs", "ins"), SIZES)
def test_sums_are_exact(kernels: DecoderKernels, rows: int, outs: int, ins: int, dtype: torch.dtype) -> None:
    weight, x, bias = (torch.randn(*size).to(dtype) for size in ((outs, ins), (rows, ins), (outs,)))
    weight[outs // 2] = 0
    x[rows // 2] *= 1000
    for b in (bias, None):
        layer = kernels.int8_linear(weight, b)
        layer(x).fill_(torch.nan)  # the buffer, which the layer may use again
        ours = layer(x)
        assert ours.dtype is dtype
        near(ours, exactly(x, weight, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_among_others(kernels: DecoderKernels, dtype: torch.dtype) -> None:
    if isinstance(kernels, TorchKernels):
        pytest.skip("torch may sum float32 in any order")
    weight, x = torch.randn(100, 96).to(dtype), torch.randn(300, 96).to(dtype)
    layer = kernels.int8_linear(weight, torch.randn(100).to(dtype))
    alone = torch.cat([layer(x[row : row + 1]).clone() for row in range(300)])
    for rows in (2, 5, 8, 9, 12, 31, 300):
        assert torch.equal(layer(x[-rows:]), alone[-rows:])


def test_the_largest_sums_do_not_saturate(kernels: DecoderKernels) -> None:
    ins = 1024
    x = torch.stack([torch.full((ins,), 127.0), torch.full((ins,), -127.0), torch.tensor([127.0, -127.0] * (ins // 2))])
    found = kernels.int8_linear(x, None)(x)
    largest = 127.0 * 127 * ins
    assert found.tolist() == [[largest, -largest, 0], [-largest, largest, 0], [0, 0, largest]]


def test_halves_are_rounded_to_even(kernels: DecoderKernels) -> None:
    x = torch.cat([torch.arange(-126.5, 127), torch.tensor([127.0, -0.0, 126.4999])])[None]
    weight = 127 * torch.eye(x.shape[1])
    assert torch.equal(kernels.int8_linear(weight, None)(x), 127 * x.round())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_nearly_0_give_0(kernels: DecoderKernels, dtype: torch.dtype) -> None:
    x = torch.zeros(3, 40).to(dtype)
    x[1, 3], x[2, 5] = 1e-38, 1e-26
    found = kernels.int8_linear(torch.ones(20, 40).to(dtype), None)(x)
    assert torch.equal(found[:2], torch.zeros(2, 20).to(dtype))
    near(found[2], x[2, 5].double().expand(20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_in_its_row(kernels: DecoderKernels, wrong: float, dtype: torch.dtype) -> None:
    layer = kernels.int8_linear(torch.randn(50, 64).to(dtype), None)
    x = torch.randn(11, 64).to(dtype)
    right = layer(x).clone()
    x[4, 33] = wrong
    found = layer(x)
    assert not found[4].isfinite().any()
    others = torch.arange(11) != 4
    torch.testing.assert_close(found[others], right[others])
