"""The GPU's linear layers against a float64 reference: on a GPU, or in Triton's interpreter (see `triton_cases`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from pliant.kernels.decoder.cuda_kernels import CudaKernels
from pliant.kernels.decoder.int8 import quantized
from pliant.kernels.decoder.triton_linear import FEW, TritonLinear

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
HAS_FLOAT8 = not ON_GPU or torch.cuda.get_device_capability() >= (8, 9)
WEIGHTS = ["as the rows", "int8", "float8"][: 3 if HAS_FLOAT8 else 2]
LARGEST_FLOAT8 = 448


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


def weight_of(kind: str, outs: int, ins: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """With its scale, if it has one."""
    weight = random(outs, ins, dtype=dtype)
    if kind == "int8":
        return quantized(weight)
    if kind == "float8":
        scale = weight.float().abs().amax(1) / LARGEST_FLOAT8
        return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale
    return weight, None


def expected(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    wide = weight.double() if scale is None else weight.double() * scale.double()[:, None]
    product = x.double() @ wide.T
    return product if bias is None else product + bias.double()


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """To within rounding, relative to the greatest number; NaN is near to nothing."""
    assert found.dtype is dtype
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outs", "ins", "processors"),
    [(1, 64, 128, 1), (2, 66, 1000, 3), (3, 130, 513, 5), (8, 2, 7, 3), (16, 70, 300, 1), (16, 128, 1024, 3)],
)
def test_products(rows: int, outs: int, ins: int, processors: int, biased: bool, kind: str, dtype: torch.dtype) -> None:
    """And gates; and the second call finds all as the first one did."""
    weight, scale = weight_of(kind, outs, ins, dtype)
    bias = random(outs, dtype=dtype) if biased else None
    x = random(rows, ins, dtype=dtype)
    layer = TritonLinear(weight, scale, bias, processors)
    wanted = expected(x, weight, scale, bias)
    gate, up = wanted.chunk(2, dim=1)
    for multiply, result in ((layer, wanted), (layer.gated, silu(gate) * up)):
        found = multiply(x)
        assert_near(found, result, dtype)
        assert torch.equal(multiply(x), found)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("rows", [FEW + 1, 40, 130])
def test_products_of_more_rows(rows: int, kind: str) -> None:
    """By torch's libraries, or in several tiles."""
    weight, scale = weight_of(kind, 130, 200, torch.float32)
    x = random(rows, 200)
    layer = TritonLinear(weight, scale, None, 4)
    wanted = expected(x, weight, scale, None)
    gate, up = wanted.chunk(2, dim=1)
    assert_near(layer(x), wanted, torch.float32)
    assert_near(layer.gated(x), silu(gate) * up, torch.float32)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_odd_numbers_of_outputs(kind: str) -> None:
    weight, scale = weight_of(kind, 61, 33, torch.float32)
    x = random(5, 33)
    assert_near(TritonLinear(weight, scale, None, 1)(x), expected(x, weight, scale, None), torch.float32)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_row_is_the_same_in_any_company(kind: str) -> None:
    weight, scale = weight_of(kind, 100, 700, torch.float32)
    x = random(FEW, 700)
    layer = TritonLinear(weight, scale, None, 3)
    whole, gated = layer(x), layer.gated(x)
    for rows in (1, 2, 9):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer.gated(x[:rows]), gated[:rows])


@pytest.mark.skipif(ON_GPU, reason="the interpreter's programs can be told when to run")
@pytest.mark.parametrize("turned", [(-1, 0), (1, 2)])
def test_it_does_not_matter_who_arrives_last(turned: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The five programs of each tile run backwards, or two places on."""
    from triton.runtime.interpreter import InterpreterBuilder

    layer, x = TritonLinear(random(128, 640), None, None, 4), random(4, 640)
    before, seen = layer(x), set()
    begin = InterpreterBuilder.set_grid_idx

    def elsewhere(self: InterpreterBuilder, row: int, column: int, split: int) -> None:
        splits, (factor, offset) = self.grid_dim[2], turned
        seen.add(splits)
        begin(self, row, column, (factor * split + offset) % splits)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", elsewhere)
    assert torch.equal(layer(x), before)
    assert seen == {5}


def test_kernels_make_them() -> None:
    """Those of `CudaKernels`, whose gate may be a launch of its own."""
    kernels, weight, bias, x = CudaKernels(processors=2), random(96, 48), random(96), random(3, 48)
    values, scale = quantized(weight)
    for layer, wanted in (
        (kernels.linear(weight, bias), expected(x, weight, None, bias)),
        (kernels.int8_linear(weight, bias), expected(x, values, scale, bias)),
    ):
        assert_near(layer(x), wanted, torch.float32)
        gate, up = wanted.chunk(2, dim=1)
        assert_near(kernels.gated(layer)(x), silu(gate) * up, torch.float32)
