"""Memory that a decode step reads: zero, in any shape, and aligned for the CPU kernels."""

import mmap

import pytest
import torch

from pliant.kernels import huge_pages
from pliant.kernels.huge_pages import Arena, zeros


@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), (1 << 20, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeros(shape, dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert not tensor.any()
    assert tensor.fill_(1).sum(dtype=torch.float64) == tensor.numel()


def test_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(zeros((2, 3), torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16))


def test_tensors_of_an_arena_are_aligned_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK", 4096)
    arena = Arena()
    shapes = [(7, 3), (1,), (33, 5), (2000, 2), (100,), (0,), (900,)]
    tensors = [arena.zeros(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    for number, tensor in enumerate(tensors, 1):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, 1))
    del arena
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, 1))
