"""What a process may take of a GPU that it has with others, by what torch says of one."""

from __future__ import annotations

import pytest
import torch

from pliant.errors import PliantError
from pliant.kernels import gpu_memory
from pliant.kernels.runtime_cache import device_name


@pytest.mark.parametrize("gpu", ["cuda", "cuda:1"])
@pytest.mark.parametrize(
    ("share", "free", "reserved", "left"),
    [(1.0, 80, 0, 80), (1.0, 30, 0, 30), (0.5, 80, 0, 40), (0.5, 80, 25, 15), (0.5, 10, 25, 10), (0.5, 80, 45, 0)],
)
def test_it_takes_what_is_free_within_its_share(
    monkeypatch: pytest.MonkeyPatch, gpu: str, share: float, free: int, reserved: int, left: int
) -> None:
    shares = {1: share}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", shares.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    assert gpu_memory.free_bytes(torch.device(gpu)) == left


@pytest.mark.parametrize(("gpus", "bound"), [(0, []), (0.25, [0.25]), (0.5, [0.5]), (1, [])])
def test_only_a_share_is_bounded(monkeypatch: pytest.MonkeyPatch, gpus: float, bound: list[float]) -> None:
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.append)
    gpu_memory.take_share(gpus)
    assert found == bound


@pytest.mark.parametrize("gpus", [0.25, 1])
def test_a_gpu_that_torch_cannot_use_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, gpus: float) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PliantError, match=r"^gpus: torch .* finds no GPU here; install .*$"):
        gpu_memory.take_share(gpus)
    with pytest.raises(PliantError, match="finds no GPU here"):
        device_name("cuda")


@pytest.mark.parametrize(
    ("told", "then"),
    [
        ("", "pinned_max_cached_size_mb:1"),
        ("max_split_size_mb:64", "max_split_size_mb:64,pinned_max_cached_size_mb:1"),
        ("pinned_max_cached_size_mb:32", "pinned_max_cached_size_mb:32"),
    ],
)
def test_pinned_memory_takes_what_was_asked_for_unless_told_otherwise(told: str, then: str) -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(told)
        gpu_memory.pin_exactly()
        assert torch._C._accelerator_getAllocatorSettings() == then
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
