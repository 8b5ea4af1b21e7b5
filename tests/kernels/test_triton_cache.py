"""Compiled kernels lie with all that is made once, unless the operator wants them elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pliant.kernels import triton_cache
from pliant.kernels.decoder import executor

triton = pytest.importorskip("triton")


def test_kernels_are_kept_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # to be put back
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    executor.kernels_for(torch.device("cuda"), threads=1)
    assert triton.knobs.cache.dir == str(tmp_path / "triton")


def test_the_operator_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton_cache.keep()
    assert triton.knobs.cache.dir == str(tmp_path)
