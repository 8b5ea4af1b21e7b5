"""Weights as int8: no further from what they were than half a step of their output's scale."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.kernels.decoder.int8 import quantized


@given(st.integers(1, 9), st.integers(1, 40), st.floats(-30, 30), st.integers(0, 1000))
def test_no_weight_moves_by_more_than_half_a_step(outs: int, ins: int, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outs, ins, generator=generator) * 2**size * torch.rand(outs, 1, generator=generator)
    values, scale = quantized(weight)
    assert values.dtype == torch.int8
    assert values.abs().max() == 127
    error = (values.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= scale.double()[:, None] * 0.5001).all()


def test_an_output_that_is_always_0_stays_0() -> None:
    values, scale = quantized(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert values.tolist() == [[0, 0], [64, -127]]
    assert scale[0] == 1
