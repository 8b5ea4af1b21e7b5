"""Cache folders in which nothing is made yet but what takes a compiler seconds and no test asks about: C libraries."""

from __future__ import annotations

from pathlib import Path

from pliant.kernels import c_compiler

_OF_ALL_TESTS = c_compiler.libraries()


def with_libraries(cache: Path) -> Path:
    """`cache`, made a folder in which C code is compiled only if no test has needed it before."""
    cache.mkdir(parents=True, exist_ok=True)
    _OF_ALL_TESTS.mkdir(parents=True, exist_ok=True)
    libraries = cache / _OF_ALL_TESTS.name
    libraries.symlink_to(_OF_ALL_TESTS.resolve(), target_is_directory=True)
    return cache
