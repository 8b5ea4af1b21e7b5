"""For all tests: no opinion about how fast the machine is, and an order in which workers (`pytest -n auto`) share them.

The end-to-end tests of one cluster are one worker's, and begin first, as they take longest; every other file is whole
one worker's, too, and the longest of those come next, so that no worker is left with one at the end. Then come other
clusters, whose models are trained by that time. On one core all is one worker's, and its end-to-end tests come last:
even an idle cluster takes a quarter of a core.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.virtual_loop import VirtualLoop

from pliant.kernels import c_compiler

E2E = Path(__file__).parent / "e2e"
FIRST = ("test_toy_kind.py", "test_metrics.py", "test_vision.py", "test_malformed.py")
"""They ask services without a model, or whose models are trained first, while those of others are."""
LAST = (
    "test_cascade.py",
    "test_faults.py",
    "test_llm_failures.py",
    "test_failures.py",
    "test_new_version.py",
    "test_stop.py",
)
"""The first needs compiled models, the others leave the cluster in another state."""
APART = ("test_nodes.py", "two_gateways")
"""A file with a cluster of its own, and a folder whose files share another one."""
LONGEST = ("test_compiled_classifier.py", "test_types.py")
"""Of the files of unit tests."""

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("any machine")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # no thread keeps a core from others while it waits for another
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_stays() -> None:
    """Collections of garbage do not look at what was there before a file's tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_lines_of_one_test() -> Iterator[None]:
    """What a gateway within a test does with log lines of the process ends with the test."""
    yield
    ours = logging.getLogger("pliant")
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)


@pytest.fixture(params=["c", "torch"])
def encoder_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What packed runtimes of our encoders compute with: the C code, or what stands in where no compiler is."""
    if request.param == "torch":
        monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    elif c_compiler.compiler() is None:
        pytest.skip("needs a C compiler")
    return str(request.param)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    virtual = item.get_closest_marker("virtual_time") and not item.get_closest_marker("real_time")
    return {"virtual": VirtualLoop} if virtual else {"real": asyncio.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What it makes stays to the end: collections of garbage would look at ten thousand tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, ...]:
    """Which part of the tests comes when, and which file when in it."""
    if not item.path.is_relative_to(E2E):
        is_short = item.path.name not in LONGEST
        return (3 if is_short else 1) if _cores() > 1 else 0, is_short
    order = [*FIRST, "", *LAST]
    place = order.index(item.path.name if item.path.name in order else "")
    first, *_ = item.path.relative_to(E2E).parts
    if first in APART:
        return 2, APART.index(first), place
    return 0 if _cores() > 1 else 3, place


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(_cores(), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return str(Path(file).parent) if "/e2e/" in file and not file.endswith(APART[0]) else file

    config.option.loadscopereorder = False
    return Scheduler(config, log)
