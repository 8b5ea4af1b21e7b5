"""Which tasks there are: found, loaded, unloaded, refused with reasons, kept on disk, told to gateways and replicas."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.task_house import House, names, refused
from support.vision_folders import change_tensors, vision_folder

from pliant.deployments import kinds
from pliant.deployments.serving.catalog.catalog import Seen
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.messages import OPERATOR, CatalogNews, Manager
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.planner import Planner
from pliant.deployments.vision import task_registry
from pliant.deployments.vision.messages import RegisteredTask
from pliant.deployments.vision.task_follower import TaskFollower
from pliant.deployments.vision.tasks import TaskReconciler, Tasks
from pliant.formats.vision_task import WEIGHTS

pytestmark = pytest.mark.virtual_time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vision_folder(folder)
    return folder


@pytest.fixture
def house(tmp_path: Path, model: Path) -> House:
    return House(tmp_path, model)


async def test_tasks_of_the_folder_are_there_from_the_start(house: House) -> None:
    house.task(house.tasks / "parity", labels=("even", "odd"))
    house.task(house.tasks / "renamed", name="large")
    (house.tasks / "README").touch()
    (house.tasks / ".git").mkdir()
    (house.tasks / "empty").mkdir()
    registry = await house.open()
    assert names(registry) == ["digits/large", "digits/parity"]
    entry = registry.catalog.entries["digits/parity"]
    assert (entry.service, entry.labels, entry.slo_ms, entry.utility) == ("digits", ("even", "odd"), 600, 0.5)
    assert entry.task.folder == str(house.tasks / "parity")
    assert registry.catalog.problems == []
    assert not house.kept(), "nobody has said anything yet"


async def test_what_is_wrong_in_the_folder_is_told_and_harms_nothing_else(house: House) -> None:
    house.task(house.tasks / "fine")
    house.task(house.tasks / "twin", name="fine")
    change_tensors(house.task(house.tasks / "broken") / WEIGHTS, without="head.bias")
    registry = await house.open()
    assert names(registry) == ["digits/fine"]
    assert len(registry.catalog.problems) == 2
    for text in ("head.bias", "digits has 'fine' already"):
        assert any(text in problem for problem in registry.catalog.problems), text


@pytest.mark.parametrize("wrong", ["missing", "task"])
async def test_a_folder_that_is_none_of_tasks(house: House, wrong: str) -> None:
    if wrong == "task":
        house.task(house.tasks)
    else:
        house.tasks.rmdir()
    registry = await house.open()
    [problem] = registry.catalog.problems
    assert "tasks.folder" in problem
    house.task(house.more / "parity")
    assert await registry.load("digits", "parity", "parity")


async def test_load_and_unload_outlive_the_planner(house: House) -> None:
    house.task(house.tasks / "found")
    house.task(house.more / "parity")
    registry = await house.open()
    entry = await registry.load("digits", "odd", str(house.more / "parity"))
    assert entry.task.name == "odd"
    await registry.load("digits", "other", "parity")
    await registry.unload("digits", "other")
    await registry.unload("digits", "found")
    again = await house.open()
    assert again.catalog.entries == {"digits/odd": entry}
    await again.load("digits", "found", "found")
    await again.unload("digits", "odd")
    assert names(await house.open()) == ["digits/found"]


async def test_an_unloaded_task_of_the_folder_comes_back_when_it_changes(house: House) -> None:
    house.task(house.tasks / "found")
    await (await house.open()).unload("digits", "found")
    assert names(await house.open()) == []
    house.task(house.tasks / "found", seed=1)
    assert names(await house.open()) == ["digits/found"]


async def test_a_task_takes_the_place_of_another_only_when_asked_to(house: House) -> None:
    house.task(house.more / "a")
    house.task(house.more / "b", seed=1)
    registry = await house.open()
    first = await registry.load("digits", "parity", "a")
    assert (
        await refused(
            registry.load("digits", "parity", "b"),
            "digits has 'parity' already; unload it first, or send replace: true",
        )
        == Fault.CONFLICT
    )
    second = await registry.load("digits", "parity", "b", replace=True)
    assert first.task.key != second.task.key
    assert (await house.open()).catalog.entries == {"digits/parity": second}


async def test_what_an_earlier_planner_may_have_loaded_is_loaded_again(house: House) -> None:
    house.task(house.more / "a")
    house.task(house.more / "b", seed=1)
    first = await (await house.open()).load("digits", "parity", "a")
    registry = await house.open()
    again = await registry.load("digits", "parity", "a", again=True)
    assert again._replace(created=first.created) == first
    refusal = registry.load("digits", "parity", "b", again=True)
    assert await refused(refusal, "digits has 'parity' already") == Fault.CONFLICT
    assert names(await house.open()) == ["digits/parity"]


async def test_refusals(house: House, tmp_path: Path) -> None:
    house.task(house.more / "fine")
    change_tensors(house.task(house.more / "broken") / WEIGHTS, without="head.bias")
    house.task(tmp_path / "outside")
    (house.more / "link").symlink_to(tmp_path / "outside")
    registry = await house.open()
    load = registry.load
    assert (
        await refused(load("digits", "x", str(tmp_path / "outside")), "outside of the folders from which digits")
        == Fault.FORBIDDEN
    )
    assert await refused(load("digits", "x", "link"), "lies outside") == Fault.FORBIDDEN
    assert await refused(load("digits", "x", "../outside"), "lies outside") == Fault.FORBIDDEN
    assert await refused(load("digits", "x", "nothing"), "there is no folder 'nothing'") == Fault.NOT_FOUND
    assert await refused(load("digits", "x", "a\0b"), "is no path") == Fault.NOT_FOUND
    assert await refused(load("digits", "x", "broken"), "head.bias") == Outcome.REJECTED
    assert await refused(load("digits", "a/b", "fine"), "must be up to 64 letters") == Outcome.REJECTED
    assert (
        await refused(load("topics", "x", "fine"), "'topics' is no vision service; there are: digits")
        == Fault.NOT_FOUND
    )
    assert await refused(registry.unload("digits", "x"), "digits has no 'x'") == Fault.NOT_FOUND
    assert names(registry) == []
    assert not house.kept()


async def test_there_are_not_too_many(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_registry, "MOST_TASKS", 1)
    house.task(house.more / "fine")
    registry = await house.open()
    await registry.load("digits", "a", "fine")
    assert await refused(registry.load("digits", "b", "fine"), "as many as there may be") == Outcome.REJECTED


async def test_what_cannot_be_written_is_not_changed(house: House) -> None:
    house.task(house.more / "fine")
    (house.state / "task-registries").touch()
    registry = await house.open()
    assert await refused(registry.load("digits", "a", "fine"), "nothing was changed") == Outcome.UNAVAILABLE
    assert names(registry) == []


async def test_a_kept_task_that_has_gone_is_told(house: House) -> None:
    house.task(house.more / "fine")
    await (await house.open()).load("digits", "a", "fine")
    shutil.rmtree(house.more / "fine")
    registry = await house.open()
    assert names(registry) == []
    assert "a, loaded earlier, is not served: there is no folder" in registry.catalog.problems[0]
    assert house.kept()["loaded"], "it may come back"


class Loader:
    """A replica's memory that takes a while."""

    def __init__(self) -> None:
        self.held: list[str] = []

    async def load(self, task: Any) -> dict[int, float]:
        await asyncio.sleep(0.05)
        if task.folder.endswith("heavy"):
            raise MemoryError("too heavy")
        self.held.append(task.name)
        return {0: 1.0}

    async def unload(self, task: Any) -> None:
        self.held.remove(task.name)


@pytest.fixture
async def followed(house: House) -> AsyncIterator[tuple[TaskFollower, Loader]]:
    """A planner, a gateway's follower, and a replica that follows as `VisionReplica` does."""
    house.task(house.tasks / "found")
    house.task(house.more / "fine")
    house.task(house.more / "heavy", seed=1)
    services = {"digits": house.config().services["digits"].model_dump()}
    digits = kinds.parse({"services": services, "state": str(house.state)})
    planner = Planner(digits, kinds.loaded(), {})
    ask = partial(planner.ask, "vision")
    gateway, loader = TaskFollower(ask), Loader()
    reconciler = TaskReconciler("digits", Tasks(loader))

    async def news(me: str, seen: Seen, wait: bool) -> CatalogNews[RegisteredTask]:
        told: CatalogNews[RegisteredTask] = await ask("news", me, seen, wait, reconciler.failed)
        return told

    replica: CatalogFollower[RegisteredTask] = CatalogFollower(news, "tasks")

    async def follow() -> None:
        while True:
            await replica.ask(wait=True, within_s=10)
            await reconciler.reconcile([entry.task for entry in replica.known.values()])

    following = [asyncio.create_task(follow()), asyncio.create_task(gateway.run())]
    await gateway.find("digits", "found")
    yield gateway, loader
    for task in following:
        task.cancel()
    await asyncio.wait(following)


async def test_a_load_is_answered_when_gateways_and_replicas_have_it(
    followed: tuple[TaskFollower, Loader],
) -> None:
    gateway, loader = followed
    entry = await gateway.load("digits", "new", "fine", False)
    assert "new" in loader.held
    assert await gateway.find("digits", "new") == entry
    assert [each.task.name for each in gateway.of("digits")] == ["found", "new"]
    await gateway.unload("digits", "new")
    assert "new" not in loader.held


async def test_a_load_is_refused_when_a_replica_cannot_load_it(
    followed: tuple[TaskFollower, Loader],
) -> None:
    gateway, loader = followed
    before = await gateway.load("digits", "new", "fine", False)
    for name, replace in (("other", False), ("new", True)):
        with pytest.raises(RequestError) as error:
            await gateway.load("digits", name, "heavy", replace)
        told = f"path: a replica cannot load it: task {name}: cannot be loaded: MemoryError: too heavy"
        assert (error.value.outcome, error.value.reason) == (Outcome.REJECTED, told)
    assert await gateway.find("digits", "new") == before
    assert await gateway.catch_up()
    assert sorted(gateway.known) == ["digits/found", "digits/new"]
    assert sorted(loader.held) == ["found", "new"]


async def test_a_task_is_its_tenant_s(house: House) -> None:
    mine, other = Manager("mine", False), Manager("other", False)
    house.task(house.tasks / "found")
    for name in ("parity", "digit"):
        house.task(house.more / name)
    registry = await house.open()
    entry = await registry.load("digits", "a", "parity", by=mine)
    assert entry.owner == "mine"
    for planners in range(2):
        if planners:
            registry = await house.open()
        for name, reason in (("a", "another tenant loaded it"), ("found", "no tenant loaded it")):
            assert await refused(registry.unload("digits", name, by=other), reason) is Fault.FORBIDDEN
            refusal = registry.load("digits", name, "digit", True, by=other)
            assert await refused(refusal, "'manage-all'") is Fault.FORBIDDEN
        assert registry.catalog.entries["digits/a"] == entry
    await registry.load("digits", "a", "digit", True, by=mine)
    await registry.unload("digits", "a", by=mine)
    await registry.unload("digits", "found", by=OPERATOR)
