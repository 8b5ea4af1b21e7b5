"""Where stages compute, and how much: on a GPU in earnest, or on a CPU with tiny shapes, to see that all of it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Scale(NamedTuple):
    """`dry` stands for tiny shapes; `dtype` is what models compute in."""

    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def facts(self) -> dict[str, Any]:
        """The device in words and numbers."""
        if self.device.type == "cpu":
            return {"name": "cpu", "threads": torch.get_num_threads()}
        gpu = torch.cuda.get_device_properties(self.device)
        return {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
            "cuda": torch.version.cuda,
        }

    def seconds(self, work: Callable[[], object], repetitions: int = 20) -> float:
        """The median time that `work` takes on the device, after three warm-ups."""
        if self.dry:
            repetitions = 2
        took = [self._once(work) for _ in range(3 + repetitions)]
        return statistics.median(took[3:])

    def wall_s(self, work: Callable[[], object], repetitions: int = 10) -> float:
        """The median time until `work` has returned and the device is idle, after two warm-ups."""
        if self.dry:
            repetitions = 2
        took = []
        for _ in range(2 + repetitions):
            begun = time.perf_counter()
            work()
            self._wait()
            took.append(time.perf_counter() - begun)
        return statistics.median(took[2:])

    def first_s(self, work: Callable[[], object]) -> float:
        """Until one call of `work` is done, with whatever it prepares."""
        self._wait()
        begun = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begun

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
