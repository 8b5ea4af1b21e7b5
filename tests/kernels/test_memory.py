"""What is free here, and what this process takes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pliant.kernels import memory

_MB = 2**20


def test_what_a_process_takes_and_gives_back() -> None:
    before = memory.used_bytes("cpu")
    taken = np.ones(64 * _MB, dtype=np.uint8)
    assert memory.used_bytes("cpu") - before > 60 * _MB
    del taken
    assert memory.used_bytes("cpu") - before < 32 * _MB


def test_something_is_free() -> None:
    assert memory.free_bytes() > 16 * _MB


def test_what_is_gone_from_a_gpu_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 - sum(kept), 80))
    assert memory.used_bytes("cuda") == 30
