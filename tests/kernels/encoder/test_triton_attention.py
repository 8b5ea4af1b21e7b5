"""Attention of packed texts without a GPU: in the interpreter of Triton against the readable one, and compiled."""

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

from pliant.kernels.triton_attention import attend

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason=f"run the cases on the GPU: pytest {CASES}")
def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "support.patched_once", "-x", str(CASES)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_HANGS_AFTER_S)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("firsts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_launch_compiles_for_gpus(
    capability: int, dtype: torch.dtype, firsts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = compile_only(monkeypatch, tmp_path, capability)
    qkv = torch.zeros(40, 3, 12, 64, dtype=dtype)
    attend(*qkv.unbind(1), torch.tensor([0, 30, 40]), 30, None, firsts)
    assert set(compiled) == {"_attend"}


def test_texts_of_other_lengths_need_no_other_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = compile_only(monkeypatch, tmp_path, 90)
    qkv = torch.zeros(96, 3, 12, 64)
    found = []
    for longest in (17, 30, 32, 96):
        attend(*qkv[:longest].unbind(1), torch.tensor([0, longest]), longest, None, False)
        found.append(compiled["_attend"])
    assert all(code is found[0] for code in found)
