"""What goes wrong around the registry of adapters harms as little as it can, loses nothing in silence, and is told."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapter_house import House, names, refused
from support.peft_folders import adapter_folder, model_folder
from support.waiting import HANGS_AFTER_S, until

from pliant.deployments.llm import adapter_folders
from pliant.deployments.serving.catalog import registry as core
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.messages import Rejected
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.record import StateError, SupersededError
from pliant.deployments.serving.state.storage import FolderStorage
from pliant.errors import ModelError
from pliant.models import sources

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.fixture
def answering() -> Iterator[threading.Event]:
    """Until it is set, at the end of the test at the latest, a share does not answer."""
    event = threading.Event()
    yield event
    event.set()


def other(house: House, **adapters: Any) -> dict[str, Any]:
    """A second language model, with folders of its own."""
    given = {"roots": [str(house.folder / "others")], **adapters}
    return {"other": {"kind": "llm", "model": house.model, "max_length": 64, "adapters": given}}


@pytest.mark.real_time
async def test_reads_that_hang_block_no_change(
    house: House, monkeypatch: pytest.MonkeyPatch, answering: threading.Event
) -> None:
    adapter_folder(house.adapters / "sql")
    registry = await house.open()
    monkeypatch.setattr(core, "_READ_WITHIN_S", 0.05)
    monkeypatch.setattr(core, "_CHANGE_WITHIN_S", HANGS_AFTER_S)
    monkeypatch.setattr(adapter_folders, "read_adapter", lambda *_: answering.wait())
    loads = [refused(registry.load(f"x{index}", "sql"), "could not be read within") for index in range(6)]
    assert await asyncio.gather(*loads) == [Outcome.UNAVAILABLE] * 6
    await registry.unload("sql")
    assert names(registry) == []


@pytest.mark.real_time
async def test_a_write_that_hangs_is_told_and_comes_about_when_it_can(
    house: House, monkeypatch: pytest.MonkeyPatch, answering: threading.Event
) -> None:
    for name in ("law", "sql"):
        adapter_folder(house.adapters / name)
    registry = await house.open()
    monkeypatch.setattr(core, "_CHANGE_WITHIN_S", 0.05)
    create = FolderStorage.create

    def slow(*arguments: Any) -> None:
        answering.wait()
        create(*arguments)

    monkeypatch.setattr(FolderStorage, "create", slow)
    assert await refused(registry.unload("sql"), "within 0.05 s; this may yet come about") == Outcome.UNAVAILABLE
    assert (
        await refused(registry.unload("law"), "within 0.05 s; nothing was changed: retry later") == Outcome.UNAVAILABLE
    )
    assert names(registry) == ["law", "sql"]
    answering.set()
    await until(lambda: names(registry) == ["law"])
    monkeypatch.setattr(core, "_CHANGE_WITHIN_S", HANGS_AFTER_S)
    registry = await house.open()
    assert names(registry) == ["law"], "memory and disk agree"
    await registry.unload("law")


async def test_a_folder_that_cannot_be_read_is_told_and_the_rest_goes_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_folder(house.more / "sql")
    adapter_folder(house.folder / "others" / "law")
    await (await house.open()).load("sql", "sql")
    listed = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path == house.adapters:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    registry = await house.open(other(house, folder=str(house.folder / "others")))
    assert names(registry) == ["law", "sql"]
    assert registry.catalog.problems == [
        f"chat: adapters.folder: {house.adapters.name} cannot be read: Permission denied"
    ]
    registry.check()


@pytest.mark.parametrize("error", [ModelError("the hub does not answer"), OSError(5, "I/O error"), RuntimeError("?")])
async def test_a_model_that_cannot_be_read_keeps_no_planner_from_planning(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    adapter_folder(house.more / "sql")
    await (await house.open()).load("sql", "sql")
    kept = house.kept()

    def check(_: str) -> Any:
        raise error

    monkeypatch.setattr(sources, "check_decoder", check)
    registry = await house.open({"x": {"kind": "llm", "model": house.model}})
    part = CatalogPart(registry)
    news = await part.news("g", ("", -1), False)
    assert (dict(news.changes), len(news.problems)) == ({}, 1)
    assert str(error) in news.problems[0]
    part.check()
    assert await refused(registry.load("more", "sql"), "its model could not be read") == Outcome.UNAVAILABLE
    assert house.kept() == kept
    monkeypatch.undo()
    assert names(await house.open()) == ["sql"]


async def test_run_time_changes_can_be_switched_off(house: House) -> None:
    adapter_folder(house.adapters / "sql")
    (house.folder / "others").mkdir()
    registry = await house.open(runtime=False)
    remedy = "chat has adapters.runtime: false, .*; set it to true, or put them into adapters.folder"
    assert await refused(registry.load("x", "sql"), remedy) == Fault.FORBIDDEN
    assert await refused(registry.load("x", "sql", "chat"), remedy) == Fault.FORBIDDEN
    assert await refused(registry.unload("sql"), remedy) == Fault.FORBIDDEN
    assert await refused(registry.unload("nothing"), "there is no adapter") == Fault.NOT_FOUND
    assert names(registry) == ["sql"]
    registry = await house.open(other(house), runtime=False)
    adapter_folder(house.folder / "others" / "law")
    assert (await registry.load("law", "law")).service == "other"
    assert await refused(registry.load("x", "law", "chat"), remedy) == Fault.FORBIDDEN


async def test_links_lead_out_of_no_folder(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = adapter_folder(house.folder / "outside")
    (house.adapters / "link").symlink_to(outside)
    registry = await house.open()
    assert names(registry) == []
    [problem] = registry.catalog.problems
    assert "lies outside of the folders from which chat loads" in problem
    inside = adapter_folder(house.more / "sql")
    read = adapter_folders.read_adapter

    def swapped(folder: Path, *limits: Any) -> Any:
        """Somebody is quicker."""
        inside.rename(house.folder / "away")
        inside.symlink_to(outside)
        return read(folder, *limits)

    monkeypatch.setattr(adapter_folders, "read_adapter", swapped)
    assert await refused(registry.load("x", "sql"), "lies outside") == Fault.FORBIDDEN


async def test_what_does_not_fit_another_model_is_there_again_with_the_first(house: House) -> None:
    adapter_folder(house.more / "one", rank=4)
    adapter_folder(house.more / "two", rank=4)
    registry = await house.open()
    for name in ("one", "two"):
        await registry.load(name, name)
    first = house.model
    house.model = model_folder(house.folder / "wide", hidden_size=32)
    adapter_folder(house.more / "three", hidden=32)
    registry = await house.open()
    assert names(registry) == []
    assert len(registry.catalog.problems) == 2
    await registry.load("three", "three")
    registry = await house.open()
    assert names(registry) == ["three"]
    await registry.unload("two")
    house.model = first
    registry = await house.open()
    assert names(registry) == ["one"]
    assert "three, loaded earlier for" in registry.catalog.problems[0]


async def test_what_is_away_can_be_unloaded_or_replaced_and_the_folder_s_stands_in(house: House) -> None:
    for name in ("sql", "law", "tax"):
        adapter_folder(house.more / name, rank=2)
    registry = await house.open()
    for name in ("sql", "law", "tax"):
        await registry.load(name, name)
    house.more.rename(house.folder / "away")
    adapter_folder(house.adapters / "sql", rank=8)
    registry = await house.open()
    assert {name: entry.adapter.rank for name, entry in registry.catalog.entries.items()} == {"sql": 8}
    await registry.unload("law")
    assert await refused(registry.unload("law"), "there is no adapter") == Fault.NOT_FOUND
    await registry.load("tax", "sql")
    (house.folder / "away").rename(house.more)
    registry = await house.open()
    assert {name: entry.adapter.rank for name, entry in registry.catalog.entries.items()} == {"sql": 2, "tax": 8}
    house.more.rename(house.folder / "away")
    await (await house.open()).unload("sql")
    (house.folder / "away").rename(house.more)
    assert names(await house.open()) == ["tax"], "both of that name are gone"


async def test_weights_that_were_written_over_are_known_after_a_start(house: House) -> None:
    folder = adapter_folder(house.more / "sql", rank=4)
    adapter_folder(house.more / "same")
    adapter_folder(house.more / "spoilt")
    registry = await house.open()
    entries = {name: await registry.load(name, name) for name in ("same", "spoilt", "sql")}
    adapter_folder(folder, rank=8, seed=1)
    (house.more / "spoilt" / "adapter_model.safetensors").unlink()
    registry = await house.open()
    assert registry.catalog.entries == entries, "believed at first"
    await registry._refresh
    entry = registry.catalog.entries["sql"]
    assert entry.adapter.rank == 8
    assert entry.adapter.revision != entries["sql"].adapter.revision
    assert entry.created == entries["sql"].created
    assert registry.catalog.entries["same"] is not None
    [problem] = registry.catalog.problems
    assert "spoilt, loaded earlier: " in problem
    await registry.unload("sql")
    assert names(await house.open()) == ["same", "spoilt"]


async def test_pinned_adapters_count_as_always_in_memory(house: House) -> None:
    model = model_folder(house.folder / "large", hidden_size=1024, num_attention_heads=8, num_key_value_heads=1)
    options = {"folder": str(house.folder / "pins"), "pinned": ["first"]}
    services = {
        "big": {"kind": "llm", "model": model, "max_length": 64, "memory_mb": 1, "slots": 1, "adapters": options}
    }
    for name in ("first", "second"):
        adapter_folder(house.folder / "pins" / name, rank=32, hidden=1024)
    registry = await house.open(services)
    assert names(registry) == ["first"]
    [problem] = registry.catalog.problems
    expected = r"rank 32 takes 0.5 MB, .* tokens 0.1 MB, and pinned adapters 0.5 MB: 1.1 MB, but big has memory_mb: 1"
    assert re.search(expected, problem)
    assert await refused(registry.load("third", "second", "big"), "and pinned adapters 0.5 MB") == Outcome.REJECTED


async def test_a_pinned_name_is_the_folder_s(house: House) -> None:
    """As replicas pin it, whatever was loaded under that name or unloaded before."""
    adapter_folder(house.adapters / "sql", rank=2)
    adapter_folder(house.adapters / "law")
    adapter_folder(house.more / "better", rank=16)
    registry = await house.open()
    await registry.load("sql", "better", in_place=True)
    await registry.load("tax", "better")
    await registry.unload("law")
    registry = await house.open(pinned=["sql", "law", "tax"])
    assert {name: entry.adapter.rank for name, entry in registry.catalog.entries.items()} == {"sql": 2, "law": 4}
    assert [problem.split(";")[0] for problem in registry.catalog.problems] == [
        *(f"chat: adapters.pinned: {name} is pinned, so it is the one of the folder" for name in ("sql", "tax")),
        "chat: adapters.pinned: got tax",
    ]
    assert await refused(registry.load("tax", "better"), "is pinned") == Outcome.REJECTED
    registry = await house.open()
    assert {name: entry.adapter.rank for name, entry in registry.catalog.entries.items()} == {"sql": 16, "tax": 16}


async def test_a_pinned_name_that_another_service_has_is_missed(house: House) -> None:
    adapter_folder(house.folder / "others" / "sql")
    adapter_folder(house.adapters / "sql")
    services = other(house, folder=str(house.folder / "others"), pinned=["sql"])
    registry = await house.open(services)
    assert registry.catalog.entries["sql"].service == "chat"
    assert any("other: adapters.pinned: got sql; there is no such" in problem for problem in registry.catalog.problems)


async def test_a_planner_that_was_cut_off_writes_nothing_and_wants_to_be_replaced(house: House) -> None:
    for name in ("law", "sql"):
        adapter_folder(house.more / name)
    old = await house.open()
    await old.load("sql", "sql")
    new = await house.open()
    old.check()
    assert await refused(old.load("lost", "law"), "^another planner has taken over the state") == Outcome.UNAVAILABLE
    assert names(old) == ["sql"]
    with pytest.raises(SupersededError):
        old.check()
    await new.load("law", "law")
    assert names(await house.open()) == ["law", "sql"]


async def test_what_was_away_at_the_start_is_found_once_it_is_there(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_folder(house.adapters / "found")
    adapter_folder(house.more / "sql")
    await (await house.open()).load("sql", "sql")
    away = [(folder, folder.with_name(f"{folder.name}-away")) for folder in (house.state, house.adapters)]
    for folder, aside in away:
        folder.rename(aside)

    def hub(_: str) -> Any:
        raise ModelError("the hub does not answer")

    monkeypatch.setattr(sources, "check_decoder", hub)
    registry = await house.open()
    assert names(registry) == []
    assert len(registry.catalog.problems) == 2
    monkeypatch.undo()
    for expected in ([], ["found", "sql"]):
        await asyncio.sleep(core._AGAIN_S[1])
        assert names(registry) == expected
        for folder, aside in away:
            if aside.exists():
                aside.rename(folder)
    assert registry.catalog.problems == []
    await registry.unload("sql")
    assert names(await house.open()) == ["found"]


async def test_what_is_unloaded_while_it_is_looked_at_again_does_not_come_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_folder(house.adapters / "sql")
    (house.adapters / "broken").mkdir()
    registry = await house.open()
    source, loop = registry._sources["chat"], asyncio.get_running_loop()
    scan, found = source.scan, asyncio.Event()
    go_on = threading.Event()

    def slow() -> Any:
        entries = list(scan())
        loop.call_soon_threadsafe(found.set)
        go_on.wait()
        return entries

    monkeypatch.setattr(source, "scan", slow)
    again = asyncio.create_task(registry._scan("chat"))
    await found.wait()
    await registry.unload("sql")
    go_on.set()
    await again
    assert names(registry) == []


async def test_a_full_disk_hides_nothing_that_was_loaded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_folder(house.more / "sql")
    await (await house.open()).load("sql", "sql")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderStorage, "create", full)
    registry = await house.open()
    assert names(registry) == ["sql"]
    assert await refused(registry.unload("sql"), "nothing was changed, because .*No space left") == Outcome.UNAVAILABLE
    monkeypatch.undo()
    await asyncio.sleep(core._AGAIN_S[1])
    await registry.unload("sql")


async def test_a_damaged_file_is_told_for_good_and_the_one_before_it_is_used(house: House) -> None:
    adapter_folder(house.more / "sql")
    registry = await house.open()
    await registry.load("sql", "sql")
    await registry.load("law", "sql")
    house.spoil()
    registry = await house.open()
    assert names(registry) == ["sql"]
    [problem] = registry.catalog.problems
    assert re.search(
        r"chat\.\d{6} is damaged .*; it is now registries/chat\.\d{6}\.broken; generation \d is used", problem
    )
    await asyncio.sleep(core._AGAIN_S[1])
    assert registry.catalog.problems == [problem]
    await registry.load("law", "sql")
    assert names(await house.open()) == ["law", "sql"]


async def test_a_planner_that_another_one_follows_takes_no_gateway_back(house: House) -> None:
    for name in ("law", "sql"):
        adapter_folder(house.more / name)
    old, new = await house.open(), await house.open()
    await new.load("sql", "sql")
    part = CatalogPart(old)
    told = await CatalogPart(new).news("gateway", ("", -1), True)
    for seen, wait in (((told.life, told.version), True), ((old.catalog._life, 0), False)):
        with pytest.raises(SupersededError):
            await part.news("gateway", seen, wait)
    rejected = await part.unload("sql")
    assert isinstance(rejected, Rejected)
    assert rejected.outcome is Outcome.UNAVAILABLE
    assert "another planner has taken over" in rejected.reason
    with pytest.raises(SupersededError):
        part.check()


async def test_what_cannot_be_read_is_not_denied(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_folder(house.more / "sql")
    await (await house.open()).load("sql", "sql")
    monkeypatch.setattr(FolderStorage, "names", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    part = CatalogPart(await house.open())
    monkeypatch.undo()
    rejected = await part.unload("sql")
    assert isinstance(rejected, Rejected)
    assert rejected.outcome is Outcome.UNAVAILABLE
    with pytest.raises(StateError):
        await part.news("gateway", ("another planner's", 3), True)
    await asyncio.sleep(core._AGAIN_S[0] + 1)
    await part.news("gateway", ("another planner's", 3), True)
    assert not isinstance(await part.unload("sql"), Rejected)


async def test_what_is_read_only_in_part_is_not_denied(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that cannot claim the state has read it; an older one that lives on stores something, and then the
    state cannot be read whole."""
    for name in ("sql", "law"):
        adapter_folder(house.more / name)
    old = await house.open()
    await old.load("sql", "sql")
    create, read = FolderStorage.create, FolderStorage.read
    monkeypatch.setattr(FolderStorage, "create", _fails)
    part = CatalogPart(await house.open())
    monkeypatch.setattr(FolderStorage, "create", create)
    await old.load("law", "law")
    reads = 0

    def once(storage: FolderStorage, path: str) -> bytes:
        nonlocal reads
        reads += 1
        return read(storage, path) if reads == 1 else _fails()

    monkeypatch.setattr(FolderStorage, "create", _fails)
    monkeypatch.setattr(FolderStorage, "read", once)
    await asyncio.sleep(core._AGAIN_S[0] + 1)
    assert reads > 1
    monkeypatch.setattr(FolderStorage, "read", read)
    rejected = await part.unload("law")
    assert isinstance(rejected, Rejected)
    assert rejected.outcome is Outcome.UNAVAILABLE


def _fails(*_what: Any) -> Any:
    raise OSError(5, "I/O error")


async def test_a_change_that_may_have_come_about_says_so_and_is_settled(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_folder(house.more / "sql")
    registry = await house.open()
    create = FolderStorage.create

    def lies(*what: Any) -> None:
        create(*what)
        raise OSError(5, "I/O error")

    monkeypatch.setattr(FolderStorage, "create", lies)
    assert await refused(registry.load("sql", "sql"), "I/O error; this may yet come about: see") == Outcome.UNAVAILABLE
    assert house.kept()["loaded"].keys() == {"sql"}
    monkeypatch.undo()
    await asyncio.sleep(core._SETTLE_EVERY_S + 1)
    assert house.kept()["loaded"] == {}
    assert names(registry) == []
