"""Weights as fp8: no further from what they were than its rounding; layers and pages of it against wide ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.kernels.decoder import executor, fp8
from pliant.kernels.decoder.fp8 import E4M3, LARGEST, OldGpuError, quantized, stored_as
from pliant.kernels.decoder.kernels import TorchKernels
from pliant.kernels.decoder.ragged import Span, ragged

CPU = torch.device("cpu")
STEP = 2**-4
"""Of three bits behind the first, relative."""


@given(st.integers(1, 9), st.integers(1, 40), st.floats(-30, 30), st.integers(0, 1000), st.sampled_from([1, 4]))
def test_no_weight_moves_by_more_than_half_a_step(outs: int, ins: int, size: float, seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outs, ins, generator=generator) * 2**size * torch.rand(outs, 1, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pliant.kernels.decoder.quantized._AT_ONCE", rows)
        values, scale = quantized(weight)
    assert values.dtype == E4M3
    assert (values.float().abs().amax(1) == LARGEST).all()
    error = (values.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= torch.maximum(weight.double().abs() * STEP, scale.double()[:, None] * 2**-10) * 1.0001).all()


def test_an_output_that_is_always_0_stays_0() -> None:
    values, scale = quantized(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert values.float().tolist() == [[0, 0], [224, -448]]
    assert scale[0] == 1


def test_what_is_too_large_to_be_stored_is_cut_off() -> None:
    x = torch.tensor([1e9, 470.0, -1e5, 3.0])
    assert stored_as(x, E4M3).float().tolist() == [448, 448, -448, 3]
    assert stored_as(x, torch.float32).equal(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_multiplies_by_what_its_weight_stands_for(biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(50, 70).to(dtype), torch.randn(5, 70).to(dtype)
    bias = torch.randn(50).to(dtype) if biased else None
    values, scale = quantized(weight)
    expected = x.double() @ (values.double() * scale.double()[:, None]).T + (0 if bias is None else bias.double())
    found = TorchKernels().fp8_linear(weight, bias)(x)
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]


def test_pages_hold_and_give_back_keys_and_values() -> None:
    """As wide ones do, up to rounding; attention to them is attention to what they stand for."""
    torch.manual_seed(0)
    kernels, qkv = TorchKernels(), torch.randn(5, 8 * 16)
    qkv[0] *= 1000
    tables = np.array([[1, 4], [2, 0]], np.int32)
    batch = ragged(np.array([17, 0], np.int32), tables, [(Span(2, 3), np.array([3], np.int32))], 16, CPU)
    angles = torch.randn(32, 8).repeat(1, 2)
    wide = [torch.randn(5, 2, 16, 16) for _ in range(2)]
    narrow = [stored_as(buffer, E4M3) for buffer in wide]
    places = batch.positions, batch.pages, (angles.cos(), angles.sin()), None, 1e-6
    q, same_q = (kernels.rotate_and_store(qkv, *places, *buffers) for buffers in (wide, narrow))
    assert q.equal(same_q)
    for exact, stored in zip(wide, narrow, strict=True):
        bounded = exact.clamp(-LARGEST, LARGEST)
        assert ((stored.float() - bounded).abs() <= bounded.abs() * STEP + 2**-10).all()
    found = kernels.attention(q, *narrow, batch, None)
    expected = kernels.attention(q, *(buffer.float() for buffer in narrow), batch, None)
    torch.testing.assert_close(found, expected)


def test_a_gpu_without_fp8_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    capability: Any = [8, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    with pytest.raises(
        OldGpuError, match=r"^quantize: fp8 needs .* 8\.9 .*; NVIDIA A100 has 8\.0: leave quantize out$"
    ):
        executor.kernels_for(torch.device("cuda", 0), 1, "fp8")
    capability[:] = 8, 9
    fp8.check(torch.device("cuda", 0))
