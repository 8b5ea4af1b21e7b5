"""A plugin of pytest for Triton's interpreter, which else patches all of Triton's language at each launch and each call
of a device function, a third of its time: here once for a process, in which everything is interpreted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

_patch: Callable[[Any], Any] = interpreter._patch_lang
_patched: set[frozenset[str]] = set()


def _once(function: Any) -> Any:
    """Nothing to restore."""
    seen = frozenset(value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
    if seen not in _patched:
        _patch(function)
        _patched.add(seen)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _once
