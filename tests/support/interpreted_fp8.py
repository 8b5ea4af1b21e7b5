"""Triton's interpreter rounds to fp8 wrongly: what is rounded up to the next power of two becomes another number."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def rounded_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it rounds to fp8 as torch does."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float

    def converted(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target is not tl.float8e4nv:
            return convert(given, source, target, rounding)
        wide = given if source is tl.float32 else convert(given, source, tl.float32, None)
        numbers = torch.from_numpy(wide.view("float32"))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
