"""Tiny classifiers, and what is compiled of them: made once for all tests."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_classifiers
from compiled_cases import CASES, Case

from pliant.kernels.compiled_classifier import Runtime, load


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of an untrained classifier of that model type; its path has a space."""
    root = tmp_path_factory.mktemp("tiny models")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            tiny_classifiers.save(root / kind, kind)
        return root / kind

    return folder


@pytest.fixture(scope="session")
def runtimes_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def runtimes(classifier: Callable[[str], Path], runtimes_cache: Path) -> dict[Case, Runtime]:
    """All CASES, compiled two at a time into `runtimes_cache`."""
    folders = {case: classifier(case.kind) for case in CASES}

    def compiled(case: Case) -> Runtime:
        _, max_length, dtype, dynamic, importance = case
        return load(folders[case], max_length, dtype=dtype, dynamic=dynamic, importance=importance)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("PLIANT_CACHE", str(runtimes_cache))
        return dict(zip(CASES, pool.map(compiled, CASES), strict=True))
