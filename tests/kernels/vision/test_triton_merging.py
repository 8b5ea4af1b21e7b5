"""Merging on a GPU without one: in the interpreter of Triton against the readable one, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.triton_target import compile_only
from support.waiting import PROCESS_HANGS_AFTER_S

pytest.importorskip("triton")

from pliant.kernels.vision import triton_merging

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason=f"run the cases on the GPU: pytest {CASES}")
def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "support.patched_once", "-x", str(CASES)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_HANGS_AFTER_S)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_launch_compiles_for_gpus(
    capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = compile_only(monkeypatch, tmp_path, capability)
    keys = torch.zeros(2, 197, 3, 12, 64, dtype=dtype)[:, :, 1]
    x = torch.zeros(2, 197, 768, dtype=dtype)
    triton_merging.merge(x, x, torch.ones(2, 197), triton_merging.match(keys, 1, 13))
    assert set(compiled) == {"_best", "_arrange", "_merge"}
