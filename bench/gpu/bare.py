"""What a bare CUDA image lacks, made to be missing here too."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from typing import Any

CARRIED = ("annotated_types", "pydantic", "pydantic_core", "typing_inspection")
"""What an image lacks and our engine's messages want: 3 MB of wheels, to be brought along. Without them the engine is
skipped."""
LACKS = (
    *("fastapi", "llguidance", "msgspec", "opentelemetry", "ortools", "platformdirs", "prometheus_client"),
    *("ray", "starlette", "timm", "torchvision", "uvicorn"),
)
"""What nothing here may want: it is not on every image with CUDA, and not brought along."""


class _Without:
    """A finder of modules that finds some packages no more."""

    def __init__(self, finder: Any, packages: Collection[str]) -> None:
        self._finder = finder
        self._packages = frozenset(packages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        hidden = name.partition(".")[0] in self._packages
        found: ModuleSpec | None = None if hidden else self._finder.find_spec(name, path, target)
        return found


def hide(packages: Collection[str] = LACKS) -> None:
    """From now on this process finds none of these packages. Raises RuntimeError if it has imported one before."""
    if early := sorted({name.partition(".")[0] for name in sys.modules} & set(packages)):
        raise RuntimeError(f"imported before it was hidden: {', '.join(early)}")
    sys.meta_path[:] = [_Without(finder, packages) for finder in sys.meta_path]
