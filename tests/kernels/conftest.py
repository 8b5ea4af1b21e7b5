"""Tiny classifiers, and what is compiled of them: made once for all tests."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import tiny_classifiers
from support.compiled_cases import CASES, Case

from pliant.cache import made_once
from pliant.kernels.encoder.compiled_classifier import Runtime, load


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of an untrained classifier of that model type; its path has a space."""
    root = _shared(tmp_path_factory) / "tiny models"
    return lambda kind: made_once(root / kind, lambda into: tiny_classifiers.save(into, kind))


@pytest.fixture(scope="session")
def runtimes_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _shared(tmp_path_factory) / "cache"


@pytest.fixture(scope="session")
def runtimes(classifier: Callable[[str], Path], runtimes_cache: Path) -> dict[Case, Runtime]:
    """All CASES, compiled two at a time into `runtimes_cache`."""
    folders = {case: classifier(case.kind) for case in CASES}

    def compiled(case: Case) -> Runtime:
        options = case._asdict()
        return load(folders[case], options.pop("max_length"), **{key: options[key] for key in options if key != "kind"})

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("PLIANT_CACHE", str(runtimes_cache))
        return dict(zip(CASES, pool.map(compiled, CASES), strict=True))


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run, which all its workers share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
