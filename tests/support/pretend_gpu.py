"""Code for GPUs on a CPU: tensors claim to lie on a GPU, and what would make the CPU wait for one raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.nonzero,
    torch.nonzero,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    torch.equal,
}
_CLAIMS = {vars(torch._C.TensorBase)[name].__get__: claim for name, claim in (("is_cpu", False), ("is_cuda", True))}


class WaitsForGpuError(Exception):
    """What a GPU would have been waited for."""


class PretendGpu(TorchFunctionMode):
    """As `torch.cuda.set_sync_debug_mode("error")`, where there is no GPU; for code that is to choose by `is_cpu`.

    It sees what Python asks of torch: numbers read from tensors, numbers and lists written to them or used as indices
    (each a copy from pageable memory), masks as indices, and tensors made of Python's numbers.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CLAIMS:
            return _CLAIMS[func]
        if reason := _reason(func, args):
            raise WaitsForGpuError(reason)
        return func(*args, **(kwargs or {}))


def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    """The same for code that launches kernels, which Triton's interpreter computes with what it reads."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def unseen(self: Any, *arguments: Any, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", unseen)
    return PretendGpu()


def _reason(func: Callable[..., Any], args: Sequence[Any]) -> str:
    if func in _READS:
        return f"{func.__name__} reads a tensor"
    if func is torch.tensor:
        return "torch.tensor copies from pageable memory"
    if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
        return f"{args[2]!r} is written by indexing: use fill_"
    if func in (Tensor.__setitem__, Tensor.__getitem__):
        for index in args[1] if isinstance(args[1], tuple) else (args[1],):
            if isinstance(index, list) or (isinstance(index, Tensor) and index.dtype is torch.bool):
                return f"a {type(index).__name__} is an index"
    return ""
