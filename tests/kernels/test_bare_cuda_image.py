"""Kernels import what an image with CUDA, torch, Triton and transformers has, and nothing beside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
ABSENT = ("aiohttp", "fastapi", "msgspec", "opentelemetry", "ortools", "platformdirs", "prometheus_client", "psutil")
ABSENT += ("pydantic", "ray", "starlette", "timm", "torchvision", "uvicorn", "xgrammar")
MODULES = sorted(
    ".".join(("pliant.kernels", *path.relative_to(KERNELS).with_suffix("").parts)) for path in KERNELS.rglob("*.py")
)
PROFILING = {"encoder.latency_profile", "encoder.pass_times", "encoder.timed_runtime"}
"""Check what they keep with pydantic: these run where pliant is installed."""
IMPORT = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_kernels_need_no_package_that_a_cuda_image_lacks(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "PLIANT_CACHE": str(tmp_path)}
    profiling = {f"pliant.kernels.{name}" for name in PROFILING}
    modules = [name for name in MODULES if not name.endswith("__init__") and name not in profiling]
    done = subprocess.run([sys.executable, "-c", IMPORT, *modules], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
