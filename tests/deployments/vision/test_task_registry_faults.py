"""What goes wrong around the registry of tasks harms as little as it can, loses nothing in silence, and is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.task_house import House, names, refused
from support.vision_folders import vision_folder, vision_model
from support.waiting import HANGS_AFTER_S, until

from pliant.deployments.serving.catalog import registry as core
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.record import Record
from pliant.deployments.serving.state.storage import FolderStorage
from pliant.deployments.vision import task_source
from pliant.deployments.vision.task_registry import TaskRegistry
from pliant.errors import ModelError
from pliant.models import sources

pytestmark = pytest.mark.virtual_time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vision_folder(folder)
    return folder


@pytest.fixture
def house(tmp_path: Path, model: Path) -> House:
    return House(tmp_path, model)


@pytest.fixture
def answering() -> Iterator[threading.Event]:
    """Until it is set, at the end of the test at the latest, a share does not answer."""
    event = threading.Event()
    yield event
    event.set()


def other(house: House, **changes: Any) -> dict[str, Any]:
    """A second vision service, with folders of its own."""
    (house.folder / "others").mkdir(exist_ok=True)
    tasks = {"folder": str(house.folder / "others")}
    return {"other": {"kind": "vision", "model": str(house.model), "tasks": tasks, **changes}}


@pytest.mark.real_time
async def test_reads_that_hang_block_no_change(
    house: House, monkeypatch: pytest.MonkeyPatch, answering: threading.Event
) -> None:
    house.task(house.tasks / "found")
    registry = await house.open()
    monkeypatch.setattr(core, "_READ_WITHIN_S", 0.05)
    monkeypatch.setattr(core, "_CHANGE_WITHIN_S", HANGS_AFTER_S)
    monkeypatch.setattr(task_source, "read_task", lambda *_: answering.wait())
    loads = [refused(registry.load("digits", f"x{index}", "found"), "could not be read within") for index in range(6)]
    assert await asyncio.gather(*loads) == [Outcome.UNAVAILABLE] * 6
    await registry.unload("digits", "found")
    assert names(registry) == []
    monkeypatch.setattr(TaskRegistry, "most_reading", 0)
    assert await refused(registry.load("digits", "x", "found"), "0 tasks are being loaded; retry later") == Outcome.SHED


@pytest.mark.real_time
async def test_a_write_that_hangs_is_told_and_comes_about_when_it_can(
    house: House, monkeypatch: pytest.MonkeyPatch, answering: threading.Event
) -> None:
    for name in ("one", "two"):
        house.task(house.tasks / name)
    registry = await house.open()
    monkeypatch.setattr(core, "_CHANGE_WITHIN_S", 0.05)
    create = FolderStorage.create

    def slow(*arguments: Any) -> None:
        answering.wait()
        create(*arguments)

    monkeypatch.setattr(FolderStorage, "create", slow)
    told = "within 0.05 s; this may yet come about: see the list of tasks"
    assert await refused(registry.unload("digits", "one"), told) == Outcome.UNAVAILABLE
    assert (
        await refused(registry.unload("digits", "two"), "within 0.05 s; nothing was changed: retry later")
        == Outcome.UNAVAILABLE
    )
    assert names(registry) == ["digits/one", "digits/two"]
    answering.set()
    await until(lambda: names(registry) == ["digits/two"])
    monkeypatch.setattr(core, "_CHANGE_WITHIN_S", HANGS_AFTER_S)
    registry = await house.open()
    assert names(registry) == ["digits/two"], "memory and disk agree"
    await registry.unload("digits", "two")


async def test_a_client_that_leaves_leaves_memory_and_disk_agreeing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.task(house.more / "fine")
    registry = await house.open()
    writing = asyncio.Event()
    write, loop = Record.write, asyncio.get_running_loop()

    def slow(*arguments: Any) -> None:
        loop.call_soon_threadsafe(writing.set)
        write(*arguments)

    monkeypatch.setattr(Record, "write", slow)
    load = asyncio.create_task(registry.load("digits", "a", "fine"))
    await writing.wait()
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await until(lambda: bool(names(registry)))
    assert names(await house.open()) == ["digits/a"]


async def test_one_name_twice_at_once(house: House) -> None:
    for index in range(5):
        house.task(house.more / f"t{index}", seed=index)
    registry = await house.open()
    loads = [registry.load("digits", "same", f"t{index}") for index in range(5)]
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    failed = [str(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
    assert len(failed) == 4
    assert all("has 'same' already" in reason for reason in failed)


async def test_a_folder_that_cannot_be_read_is_told_and_the_rest_goes_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.task(house.more / "fine")
    services = other(house)
    house.task(house.folder / "others" / "theirs")
    await (await house.open()).load("digits", "a", "fine")
    listed = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path == house.tasks:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    registry = await house.open(services)
    assert names(registry) == ["digits/a", "other/theirs"]
    assert registry.catalog.problems == [f"digits: tasks.folder: {house.tasks.name} cannot be read: Permission denied"]
    registry.check()


@pytest.mark.parametrize("error", [ModelError("the hub does not answer"), OSError(5, "I/O error"), RuntimeError("?")])
async def test_a_model_that_cannot_be_read_keeps_no_planner_from_planning(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    house.task(house.more / "fine")
    await (await house.open()).load("digits", "a", "fine")
    kept = house.kept()
    good = other(house)["other"] | {"model": "good"}
    house.task(house.folder / "others" / "theirs")

    def fetch(name: str) -> Path:
        if name == "good":
            return house.model
        raise error

    monkeypatch.setattr(sources, "fetch_vision", fetch)
    registry = await house.open({"other": good})
    part = CatalogPart(registry)
    news = await part.news("g", ("", -1), False)
    assert (list(news.changes), len(news.problems)) == (["other/theirs"], 1)
    assert str(error) in news.problems[0]
    part.check()
    reason = "its model could not be read when the planner began"
    assert await refused(registry.load("digits", "x", "fine"), reason) == Outcome.UNAVAILABLE
    assert house.kept() == kept
    monkeypatch.undo()
    assert names(await house.open()) == ["digits/a"]


async def test_run_time_changes_can_be_switched_off(house: House) -> None:
    house.task(house.tasks / "found")
    registry = await house.open(other(house), runtime=False)
    remedy = "digits has tasks.runtime: false, .*; set it to true, or put them into tasks.folder"
    assert await refused(registry.load("digits", "x", "found"), remedy) == Fault.FORBIDDEN
    assert await refused(registry.unload("digits", "found"), remedy) == Fault.FORBIDDEN
    assert await refused(registry.unload("digits", "nothing"), "digits has no 'nothing'") == Fault.NOT_FOUND
    house.task(house.folder / "others" / "theirs")
    assert (await registry.load("other", "x", "theirs")).service == "other"


async def test_links_lead_out_of_no_folder(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = house.task(house.folder / "outside")
    (house.tasks / "link").symlink_to(outside)
    registry = await house.open()
    assert names(registry) == []
    [problem] = registry.catalog.problems
    assert "lies outside of the folders from which digits loads tasks" in problem
    inside = house.task(house.more / "fine")
    read = task_source.read_task

    def swapped(folder: Path, *backbone: Any) -> Any:
        """Somebody is quicker."""
        inside.rename(house.folder / "away")
        inside.symlink_to(outside)
        return read(folder, *backbone)

    monkeypatch.setattr(task_source, "read_task", swapped)
    assert await refused(registry.load("digits", "x", "fine"), "lies outside") == Fault.FORBIDDEN


async def test_what_is_away_can_be_unloaded_or_replaced_and_the_folder_s_stands_in(house: House) -> None:
    for name in ("one", "two", "three"):
        house.task(house.more / name, prompts=(1,))
    registry = await house.open()
    for name in ("one", "two", "three"):
        await registry.load("digits", name, name)
    house.more.rename(house.folder / "away")
    house.task(house.tasks / "one", prompts=(2,))
    registry = await house.open()
    assert {name: entry.task.prompts for name, entry in registry.catalog.entries.items()} == {"digits/one": (2,)}
    assert len(registry.catalog.problems) == 3
    gone = await registry.unload("digits", "two")
    assert (gone.task.name, gone.task.folder) == ("two", str(house.more / "two"))
    assert await refused(registry.unload("digits", "two"), "digits has no 'two'") == Fault.NOT_FOUND
    await registry.load("digits", "three", "one")
    (house.folder / "away").rename(house.more)
    registry = await house.open()
    found = {name: entry.task.prompts for name, entry in registry.catalog.entries.items()}
    assert found == {"digits/one": (1,), "digits/three": (2,)}
    house.more.rename(house.folder / "away")
    await (await house.open()).unload("digits", "one")
    (house.folder / "away").rename(house.more)
    assert names(await house.open()) == ["digits/three"], "both of that name are gone"


async def test_what_does_not_fit_another_model_is_there_again_with_the_first(house: House) -> None:
    house.task(house.more / "one")
    await (await house.open()).load("digits", "one", "one")
    first, house.model = house.model, house.folder / "wide"
    house.model.mkdir()
    vision_folder(house.model, vision_model(embed_dim=32))
    registry = await house.open()
    assert names(registry) == []
    assert "one, loaded earlier, is not served" in registry.catalog.problems[0]
    house.model = first
    assert names(await house.open()) == ["digits/one"]


async def test_the_model_s_own_head_is_a_task_where_no_folder_is_given(house: House) -> None:
    house.task(house.more / "fine")
    registry = await house.open(folder=None)
    [entry] = registry.catalog.entries.values()
    assert (entry.service, entry.task.name, entry.task.folder) == ("digits", "model", str(house.model))
    assert entry.labels == tuple(f"LABEL_{index}" for index in range(5))
    assert (entry.task.labels, entry.task.prompts) == (5, ())
    stays = "'model' is the model's own head, which stays; choose another name"
    assert await refused(registry.load("digits", "model", "fine", replace=True), stays) == Outcome.REJECTED
    assert await refused(registry.unload("digits", "model"), stays) == Outcome.REJECTED
    await registry.load("digits", "more", "fine")
    registry = await house.open(folder=None)
    assert names(registry) == ["digits/model", "digits/more"]
    await registry.unload("digits", "more")
    registry = await house.open(folder=None, roots=())
    assert names(registry) == ["digits/model"]
    reason = "outside of the folders from which digits loads tasks: there are none"
    assert await refused(registry.load("digits", "x", "fine"), reason) == Fault.FORBIDDEN


async def test_a_service_without_any_task_is_told(house: House) -> None:
    house.model = house.folder / "headless"
    house.model.mkdir()
    vision_folder(house.model, vision_model(num_classes=0))
    registry = await house.open(folder=None, roots=())
    assert registry.catalog.problems == [
        "digits: has no tasks: its model has no head of its own; give it a folder of tasks, or roots"
    ]
    assert (await house.open(folder=None)).catalog.problems == []


async def test_names_that_were_kept_are_checked(house: House) -> None:
    house.task(house.more / "fine")
    await (await house.open()).load("digits", "a", "fine")
    kept = house.kept()
    house.store({**kept, "loaded": {"a/b": kept["loaded"]["a"]}})
    registry = await house.open()
    assert names(registry) == []
    assert "must be up to 64 letters" in registry.catalog.problems[0]


async def test_tasks_that_are_too_large_are_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.task(house.more / "fine", images=3)
    registry = await house.open()
    monkeypatch.setattr(task_source, "MOST_PROFILING", 2)
    assert (
        await refused(registry.load("digits", "x", "fine"), "has 3 images in its .*, for at most 2") == Outcome.REJECTED
    )
    monkeypatch.setattr(task_source, "_MOST_BYTES", 100)
    assert await refused(registry.load("digits", "x", "fine"), "has [0-9,]+ bytes, for at most 100") == Outcome.REJECTED
