"""Compiles Triton kernels for GPUs where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def compile_only(monkeypatch: pytest.MonkeyPatch, cache: Path, capability: int) -> dict[str, Any]:
    """From now on every launch of a kernel compiles it for GPUs of that capability, and does no more.

    What was compiled is found in the result, by the kernels' names.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import KernelInterface

    class Gpu:
        """As much of Triton's driver as its compiler asks for."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # kernels are kept by device

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled: dict[str, Any] = {}

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            compiled[kernel.__name__] = kernel.run(*arguments, grid=grid, warmup=True, **options)

        return run

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(triton.runtime.driver, "_active", Gpu())
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return compiled
