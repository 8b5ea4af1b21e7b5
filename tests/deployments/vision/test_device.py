"""The executor behind coroutines: what it is given, how tasks come and go, and whose accuracies are measured."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scripted_vision import INFO
from support.vision_folders import task_folder
from support.waiting import HANGS_AFTER_S

from pliant.deployments.vision import device as device_module
from pliant.deployments.vision.accuracy import assumed_accuracies
from pliant.deployments.vision.device import ExecutorDevice
from pliant.deployments.vision.tasks import key
from pliant.formats.vision_task import TaskError, TaskInfo, own_task, read_profiling, read_task
from pliant.models.vision_info import VisionInfo

GAMMAS = (-2, 0, 1, 4)


class Executor:
    """Answers label 1 if gamma is above 0, else label 0; complains about calls that overlap."""

    backend = "scripted"
    most_rows = 4

    def __init__(self, info: VisionInfo) -> None:
        self.info = info
        self.tasks: dict[str, Any] = {}
        self.runs: list[tuple[int, int]] = []
        self._busy = threading.Lock()

    def stage(self, folder: Path) -> Any:
        return folder.name

    def own_task(self) -> Any | None:
        return "own" if self.info.labels else None

    def add_task(self, key: str, weights: Any) -> None:
        with self._alone():
            if key in self.tasks:
                raise ValueError(f"{key} is there")
            self.tasks[key] = weights

    def remove_task(self, key: str) -> None:
        with self._alone():
            del self.tasks[key]

    def room(self, rows: int) -> Any:
        return np.empty((rows, self.info.height, self.info.width, self.info.channels), np.uint8)

    def run(self, images: Any, tasks: Sequence[str], gamma: int) -> Sequence[Any]:
        with self._alone():
            assert images.dtype == np.uint8
            assert images.shape == (len(tasks), self.info.height, self.info.width, self.info.channels)
            assert set(tasks) <= self.tasks.keys()
            self.runs.append((gamma, len(tasks)))
            return [np.array([gamma <= 0, gamma > 0], dtype=np.float32) for _ in tasks]

    def _alone(self) -> threading.Lock:
        assert not self._busy.locked()
        return self._busy


@pytest.fixture
def info() -> VisionInfo:
    return INFO


@pytest.fixture
def executor(info: VisionInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Executor:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    return Executor(info)


def device_of(executor: Executor, gammas: Sequence[int] = GAMMAS, identity: str = "here") -> ExecutorDevice:
    return ExecutorDevice(executor, ThreadPoolExecutor(1), gammas, identity)


def task(info: VisionInfo, folder: Path, **options: Any) -> TaskInfo:
    return read_task(task_folder(folder, info, **options), info)


async def test_batches_are_stacked(info: VisionInfo, executor: Executor, tmp_path: Path) -> None:
    device = device_of(executor)
    found = task(info, tmp_path / "a")
    await device.load(found.ref)
    image = bytes(info.height * info.width * info.channels)
    replies = await asyncio.gather(*(device.run([image] * n, [key(found.ref)] * n, 1) for n in (1, 3, 2)))
    assert [len(reply) for reply in replies] == [1, 3, 2]
    assert device.backend == "scripted"


async def test_accuracies_are_the_folders_where_there_is_nothing_to_measure_by(
    info: VisionInfo, executor: Executor, tmp_path: Path
) -> None:
    device = device_of(executor)
    assert await device.load(task(info, tmp_path / "a", prompts=(1, 2)).ref) == {-2: 0.7, 0: 0.8, 1: 0.9}
    assert executor.runs == []


async def test_merging_is_assumed_where_nothing_tells_of_it(
    info: VisionInfo, executor: Executor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shares = {-4: 0.75, -2: 0.9, 0: 1.0}
    device = ExecutorDevice(executor, ThreadPoolExecutor(1), (-4, -2, 0, 1), "here", shares)
    accuracies = await device.load(task(info, tmp_path / "a", prompts=(1, 2)).ref)
    assert accuracies == pytest.approx({-4: 0.6, -2: 0.7, 0: 0.8, 1: 0.9})
    told = "task a: nothing tells how accurate it is with merged tokens, assumed is 0.600 with gamma -4; profiling"
    assert told in caplog.text
    caplog.clear()
    await device.load(task(info, tmp_path / "b", images=4).ref)
    assert "nothing tells" not in caplog.text, "it is going to be measured"


async def test_accuracies_are_measured_once(info: VisionInfo, executor: Executor, tmp_path: Path) -> None:
    found = task(info, tmp_path / "a", prompts=(1, 2), images=10)
    ones = float((read_profiling(found)[1] == 1).mean())
    device = device_of(executor)
    assert await device.load(found.ref) == {-2: 0.7, 0: 0.8, 1: 0.9}
    assert executor.runs == [], "images wait for the task"
    measured = await device.measure(found.ref)
    assert measured == pytest.approx({-2: 1 - ones, 0: 1 - ones, 1: ones})
    assert executor.runs == [(gamma, rows) for gamma in (-2, 0, 1) for rows in (4, 4, 2)]
    assert await device.measure(found.ref) == measured
    await device.unload(found.ref)
    assert await device.load(found.ref) == measured
    assert len(executor.runs) == 9
    elsewhere = device_of(executor, identity="elsewhere")
    assert await elsewhere.measure(found.ref) == measured
    assert len(executor.runs) == 18
    assert await device.measure(task(info, tmp_path / "b").ref) is None


async def test_batches_come_before_measuring(info: VisionInfo, executor: Executor, tmp_path: Path) -> None:
    device = device_of(executor)
    found = task(info, tmp_path / "a", images=10)
    await device.load(found.ref)
    image, may_end, run = bytes(info.height * info.width * info.channels), threading.Event(), executor.run

    def slow(images: Any, tasks: Sequence[str], gamma: int) -> Sequence[Any]:
        assert may_end.wait(HANGS_AFTER_S)
        return run(images, tasks, gamma)

    executor.run = slow  # type: ignore[method-assign]
    batch = asyncio.create_task(device.run([image] * 3, [key(found.ref)] * 3, 1))
    measuring = asyncio.create_task(device.measure(found.ref))
    await asyncio.sleep(0.1)
    await device.ready()
    may_end.set()
    await batch
    await measuring
    assert executor.runs == [(1, 3)] + [(gamma, rows) for gamma in (-2, 0, 1) for rows in (4, 4, 2)]


async def test_a_batch_is_told_to_wait_for_the_images_that_are_measured_with(
    info: VisionInfo, executor: Executor, tmp_path: Path
) -> None:
    device = device_of(executor)
    found = task(info, tmp_path / "a", images=2)
    await device.load(found.ref)
    begun, may_end, run = threading.Event(), threading.Event(), executor.run

    def slow(images: Any, tasks: Sequence[str], gamma: int) -> Sequence[Any]:
        begun.set()
        assert may_end.wait(HANGS_AFTER_S)
        return run(images, tasks, gamma)

    executor.run = slow  # type: ignore[method-assign]
    measuring = asyncio.create_task(device.measure(found.ref))
    await asyncio.to_thread(begun.wait, HANGS_AFTER_S)
    ready = asyncio.create_task(device.ready())
    await asyncio.sleep(0.01)
    assert not ready.done()
    may_end.set()
    await ready
    await measuring


async def test_a_folder_that_does_not_answer_is_given_up(
    info: VisionInfo, executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "_READ_WITHIN_S", 0.05)
    answers = threading.Event()
    monkeypatch.setattr(executor, "stage", lambda _: answers.wait(HANGS_AFTER_S))
    with pytest.raises(TaskError, match=r"could not be read in 0\.05 s"):
        await device_of(executor).load(task(info, tmp_path / "a").ref)
    answers.set()


async def test_tasks_that_cannot_be_had(info: VisionInfo, executor: Executor, tmp_path: Path) -> None:
    device = device_of(executor)
    found = task(info, tmp_path / "a")
    with pytest.raises(TaskError, match="has changed since it was registered; register it again"):
        await device.load(found.ref._replace(revision="other"))
    with pytest.raises(TaskError, match="there is no such folder"):
        await device.load(found.ref._replace(folder=str(tmp_path / "b")))
    with pytest.raises(TaskError, match="known for none of the service's gammas, 4"):
        await device_of(executor, (4,)).load(found.ref)
    assert executor.tasks == {}


async def test_the_model_s_own_head_needs_no_folder(info: VisionInfo, executor: Executor) -> None:
    own = {-2: 0.8, 0: 1.0}
    device = ExecutorDevice(executor, ThreadPoolExecutor(1), GAMMAS, "here", own)
    task = own_task("zoo/x", 2)
    with pytest.raises(TaskError, match="no head of its own that runs with gammas -2, 0, 1, 4"):
        await device.load(task)
    executor.info = replace(info, labels=("a", "b"))
    assert await device.load(task) == own
    assert executor.tasks == {key(task): "own"}
    with pytest.raises(TaskError, match="no head of its own"):
        await device_of(executor, (8,)).load(task)


def test_what_is_assumed_of_merging() -> None:
    assert assumed_accuracies({0: [10, 10], -4: [10, 6], -2: [10, 8]}) == pytest.approx({0: 1, -2: 0.95, -4: 0.9})
