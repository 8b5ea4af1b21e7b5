"""Attention of packed texts in Triton against the readable one: on a GPU, or in Triton's interpreter.

Not collected with the other tests, as the interpreter changes Triton for a whole process: `test_triton_attention` runs
these in one of their own. The interpreter is wrong for bfloat16.
"""

from __future__ import annotations

import pytest
import torch

from pliant.kernels.encoder.layout import Packed
from pliant.kernels.encoder.triton_attention import attend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("firsts", [False, True])
@pytest.mark.parametrize("window", [None, 0, 5, 70])
@pytest.mark.parametrize("dim", [16, 24, 64])
def test_texts_attend_to_themselves_alone(dtype: torch.dtype, firsts: bool, window: int | None, dim: int) -> None:
    torch.manual_seed(dim)
    for lengths in [(1,), (130,), (3, 1, 64, 65, 17)]:
        qkv = torch.randn(sum(lengths), 3, 2, dim, device=DEVICE).to(dtype)
        starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        found = attend(*qkv.unbind(1), starts, max(lengths), window, firsts)
        wanted = Packed(lengths, "cpu").attend(*qkv.float().cpu().unbind(1), None, window, firsts)
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found.float().cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_count_as_often_as_they_are_said_to(dtype: torch.dtype) -> None:
    """As if they were there several times."""
    torch.manual_seed(0)
    lengths, times = (5, 70), torch.randint(1, 4, (75,))
    qkv = torch.randn(75, 3, 2, 16, device=DEVICE).to(dtype)
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    found = attend(*qkv.unbind(1), starts, max(lengths), None, False, times.float().to(DEVICE))
    q, k, v = qkv.float().cpu().unbind(1)
    wanted = []
    for text, often in zip(torch.split(torch.arange(75), lengths), torch.split(times, lengths), strict=True):
        repeated = text.repeat_interleave(often)
        layout = Packed([len(repeated)], "cpu")
        padded = torch.cat([q[text], q[text][:1].expand(len(repeated) - len(text), -1, -1)])
        wanted.append(layout.attend(padded, k[repeated], v[repeated], None, None, False)[: len(text)])
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found.float().cpu(), torch.cat(wanted), rtol=tolerance, atol=tolerance)
