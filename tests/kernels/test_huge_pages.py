"""Memory that a decode step reads: zero, in any shape, and aligned for the CPU kernels."""

import mmap

import numpy as np
import pytest

from pliant.kernels import huge_pages
from pliant.kernels.huge_pages import Arena, zeros


@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), (1 << 20, 3)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    array = zeros(shape, dtype)
    assert array.dtype == dtype
    assert array.shape == shape
    assert array.flags.c_contiguous
    assert not array.any()
    array.fill(1)
    assert array.all()


def test_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert (zeros((2, 3), np.int16) == np.zeros((2, 3), np.int16)).all()


def test_arrays_of_an_arena_are_aligned_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK", 4096)
    arena = Arena()
    shapes = [(7, 3), (1,), (33, 5), (2000, 2), (100,), (0,), (900,)]
    arrays = [arena.zeros(shape, dtype) for shape in shapes for dtype in (np.float32, np.int16)]
    for number, array in enumerate(arrays, 1):
        assert not array.any()
        assert array.ctypes.data % 64 == 0
        array.fill(number)
    assert all((array == number).all() for number, array in enumerate(arrays, 1))
    del arena
    assert all((array == number).all() for number, array in enumerate(arrays, 1))
