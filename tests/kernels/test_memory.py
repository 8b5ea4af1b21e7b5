"""What is free here, and what this process takes of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from pliant.kernels import memory

_MB = 2**20


def test_what_a_process_takes_and_gives_back() -> None:
    """In a process of its own: what earlier tests left in this one may be given back meanwhile."""
    taking = textwrap.dedent(
        """
        import numpy as np
        from pliant.kernels import memory

        before = memory.used_bytes("cpu")
        taken = np.ones(64 * 2**20, dtype=np.uint8)
        print(memory.used_bytes("cpu") - before)
        del taken
        print(memory.used_bytes("cpu") - before)
        """
    )
    done = subprocess.run([sys.executable, "-c", taking], capture_output=True, text=True, check=True, timeout=120)
    with_it, without = map(int, done.stdout.split())
    assert with_it > 60 * _MB
    assert without < 32 * _MB


def test_something_is_free() -> None:
    assert memory.free_bytes() > 16 * _MB


def test_what_is_gone_from_a_gpu_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 - sum(kept), 80))
    assert memory.used_bytes("cuda") == 30
