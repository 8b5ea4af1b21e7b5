"""Which adapters there are: found, loaded, unloaded, refused with reasons, kept on disk, told to gateways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.adapter_house import House, names, refused
from support.peft_folders import SLOT_TOKEN_BYTES, adapter_folder, model_folder
from support.waiting import until

from pliant.deployments.llm import adapter_registry
from pliant.deployments.llm.adapter_registry import AdapterRegistry
from pliant.deployments.llm.messages import Registered
from pliant.deployments.serving.catalog.catalog import Catalog
from pliant.deployments.serving.messages import OPERATOR, Manager
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.record import Record
from pliant.deployments.serving.state.storage import FolderStorage
from pliant.formats.adapter_info import WEIGHTS, read_adapter
from pliant.models import sources
from pliant.models.decoder_shape import DecoderShape

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


class Files:
    """The texts in a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keys(self) -> list[str]:
        return [file.name for file in self._folder.iterdir()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> str:
        return (self._folder / name).read_text()

    def __setitem__(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Where versions before `state` kept adapters."""
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "registries"
    folder.mkdir(parents=True)
    return Files(folder)


async def test_adapters_of_the_folder_are_there_from_the_start(house: House) -> None:
    adapter_folder(house.adapters / "sql", rank=8)
    adapter_folder(house.adapters / "law")
    (house.adapters / "README").touch()
    (house.adapters / ".git").mkdir()
    registry = await house.open()
    assert names(registry) == ["law", "sql"]
    entry = registry.catalog.entries["sql"]
    assert (entry.service, entry.adapter.name, entry.adapter.rank) == ("chat", "sql", 8)
    assert entry.adapter.folder == str(house.adapters / "sql")
    assert registry.catalog.problems == []
    assert not house.kept(), "nobody has said anything yet"


async def test_what_is_wrong_in_the_folder_is_told_and_harms_nothing_else(house: House) -> None:
    adapter_folder(house.adapters / "fine")
    adapter_folder(house.adapters / "wide", hidden=32)
    adapter_folder(house.adapters / "topics")
    adapter_folder(house.adapters / "a name")
    (house.adapters / "empty").mkdir()
    registry = await house.open(pinned=["fine", "lost"])
    assert names(registry) == ["fine"]
    for text in ("wide", "'topics' is the name of a model", "got 'a name'", "empty", "got lost; there is no such"):
        assert any(text in problem for problem in registry.catalog.problems), text
    assert len(registry.catalog.problems) == 5


@pytest.mark.parametrize("wrong", ["missing", "adapter"])
async def test_a_folder_that_is_none_of_adapters(house: House, wrong: str) -> None:
    if wrong == "adapter":
        adapter_folder(house.adapters)
    else:
        house.adapters.rmdir()
    registry = await house.open()
    [problem] = registry.catalog.problems
    assert "adapters.folder" in problem
    adapter_folder(house.more / "sql")
    assert await registry.load("sql", "sql")


async def test_load_and_unload_outlive_the_planner(house: House) -> None:
    adapter_folder(house.adapters / "found")
    adapter_folder(house.more / "sql", rank=2)
    registry = await house.open()
    entry = await registry.load("my-sql", str(house.more / "sql"))
    await registry.load("other", "sql")
    await registry.unload("other")
    await registry.unload("found")
    again = await house.open()
    assert again.catalog.entries == {"my-sql": entry}
    await again.load("found", "found")
    await again.unload("my-sql")
    assert names(await house.open()) == ["found"]


async def test_an_unloaded_adapter_of_the_folder_comes_back_when_it_changes(house: House) -> None:
    adapter_folder(house.adapters / "found")
    await (await house.open()).unload("found")
    assert names(await house.open()) == []
    adapter_folder(house.adapters / "found", seed=1)
    assert names(await house.open()) == ["found"]


async def test_what_was_replaced_stays_so(house: House) -> None:
    adapter_folder(house.adapters / "sql", rank=2)
    adapter_folder(house.more / "better", rank=16)
    registry = await house.open()
    first = registry.catalog.entries["sql"]
    entry = await registry.load("sql", "better", in_place=True)
    assert entry.adapter.key != first.adapter.key
    again = await house.open()
    assert again.catalog.entries == {"sql": entry}
    await again.unload("sql")
    assert names(await house.open()) == []


async def test_loading_again_is_an_error_unless_in_place(house: House) -> None:
    folder = adapter_folder(house.more / "sql")
    registry = await house.open()
    first = await registry.load("sql", "sql")
    assert (
        await refused(registry.load("sql", "sql"), "is loaded already; unload it first, or send load_in")
        == Outcome.REJECTED
    )
    assert (await registry.load("sql", "sql", in_place=True)).adapter == first.adapter
    adapter_folder(folder, rank=8)
    assert (await registry.load("sql", "sql", in_place=True)).adapter.rank == 8


async def test_paths_are_confined(house: House) -> None:
    outside = adapter_folder(house.folder / "outside")
    (house.more / "link").symlink_to(outside)
    (house.more / "loop").symlink_to(house.more / "loop")
    inside = adapter_folder(house.more / "deep" / "sql")
    (house.more / "alias").symlink_to(inside)
    registry = await house.open()
    for path in (str(outside), "../outside", "link", "/etc", "/nowhere", f"{house.adapters}/../outside"):
        assert (
            await refused(registry.load("x", path), "lies outside of the folders from which chat loads")
            == Fault.FORBIDDEN
        )
    for path in ("nothing", str(house.more / "nothing"), "~", "loop"):
        assert await refused(registry.load("x", path), "no folder|no path") == Fault.NOT_FOUND
    assert await refused(registry.load("x", "a\0b"), "no path") == Fault.NOT_FOUND
    assert (await registry.load("x", "alias")).adapter.folder == str(inside)
    assert await registry.load("y", "deep/../deep/sql")


async def test_what_cannot_be_an_adapter_is_told(house: House) -> None:
    adapter_folder(house.more / "wide", hidden=32)
    (house.more / "empty").mkdir()
    adapter_folder(house.more / "high", rank=16)
    registry = await house.open(max_rank=8)
    assert await refused(registry.load("x", "wide"), "wide") == Outcome.REJECTED
    assert await refused(registry.load("x", "empty"), r"adapter_config\.json") == Outcome.REJECTED
    assert await refused(registry.load("x", "high"), "16") == Outcome.REJECTED
    assert names(registry) == []
    assert not house.kept()


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "a\n", "é", "x" * 201, "chat", "topics"])
async def test_names(house: House, name: str) -> None:
    adapter_folder(house.more / "sql")
    registry = await house.open()
    assert (
        await refused(registry.load(name, "sql"), "lora_name: (got|'chat' is the name|'topics' is)") == Outcome.REJECTED
    )


async def test_unloading_what_is_not_there(house: House) -> None:
    registry = await house.open()
    for name in ("chat", "nothing", "x" * 10_000):
        assert await refused(registry.unload(name), "there is no adapter") == Fault.NOT_FOUND


async def test_pinned_adapters_stay(house: House) -> None:
    adapter_folder(house.adapters / "sql")
    registry = await house.open(pinned=["sql"])
    assert await refused(registry.unload("sql"), "is pinned by the configuration of chat") == Outcome.REJECTED
    assert await refused(registry.load("sql", "sql", in_place=True), "pinned") == Outcome.REJECTED
    assert names(registry) == ["sql"]


async def test_what_can_never_lie_beside_a_request_is_refused_with_the_arithmetic(house: House) -> None:
    """A slot of 64 tokens takes 16 KiB here; q_proj of rank 4 takes 1 KiB, and more ranks take more."""
    services = {"big": {"kind": "llm", "model": house.model, "max_length": 64, "memory_mb": 1, "slots": 1}}
    large = model_folder(house.folder / "large", hidden_size=1024, num_attention_heads=8, num_key_value_heads=1)
    services["big"] |= {"model": large, "adapters": {"roots": [str(house.more)]}}
    adapter_folder(house.more / "small", rank=4, hidden=1024)
    adapter_folder(house.more / "huge", rank=64, hidden=1024)
    registry = await house.open(services)
    assert (await registry.load("small", "small")).service == "big"
    reason = r"rank 64 takes 1\.0 MB, keys and values of one request of 64 tokens 0\.1 MB: 1\.1 MB.*memory_mb: 1;"
    assert await refused(registry.load("huge", "huge", "big"), reason) == Outcome.REJECTED
    assert SLOT_TOKEN_BYTES * 64 == 2**14


async def test_which_of_several_services(house: House) -> None:
    def service(model: str) -> dict[str, Any]:
        adapters = {"roots": [str(house.more)]}
        return {"kind": "llm", "model": model, "max_length": 64, "adapters": adapters}

    wide = model_folder(house.folder / "wide", hidden_size=32)
    twin = model_folder(house.folder / "twin")
    services = {"wide": service(wide), "twin": service(twin)}
    registry = await house.open(services)
    adapter_folder(house.more / "for-wide", hidden=32)
    adapter_folder(house.more / "for-twin", base=twin)
    adapter_folder(house.more / "unclear")
    adapter_folder(house.more / "misfit", hidden=64)
    assert (await registry.load("a", "for-wide")).service == "wide"
    assert (await registry.load("b", "for-twin")).service == "twin"
    assert (
        await refused(registry.load("c", "unclear"), "must be given, because 'unclear' fits several.*: chat, twin")
        == Outcome.REJECTED
    )
    assert (await registry.load("c", "unclear", "chat")).service == "chat"
    assert (
        await refused(registry.load("d", "unclear", "topics"), "'topics'; with adapters there are: chat, ")
        == Outcome.REJECTED
    )
    assert await refused(registry.load("d", "misfit"), "misfit") == Outcome.REJECTED
    assert await refused(registry.load("d", "/etc"), "lies outside") == Fault.FORBIDDEN
    assert (
        await refused(registry.load("c", "for-wide", in_place=True), "an adapter of chat, and this one is of wide")
        == Outcome.REJECTED
    )
    assert {name: entry.service for name, entry in (await house.open(services)).catalog.entries.items()} == {
        "a": "wide",
        "b": "twin",
        "c": "chat",
    }


async def test_many_at_once_and_one_name_twice(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(20):
        adapter_folder(house.more / f"a{index}")
    registry = await house.open()
    loads = [registry.load(f"a{index}", f"a{index}") for index in range(20)]
    twice = [registry.load("same", f"a{index}") for index in range(5)]
    outcomes = await asyncio.gather(*loads, *twice, return_exceptions=True)
    assert sum(isinstance(outcome, Registered) for outcome in outcomes) == 21
    assert all("loaded already" in str(outcome) for outcome in outcomes if not isinstance(outcome, Registered))
    assert len((await house.open()).catalog.entries) == 21
    monkeypatch.setattr(adapter_registry, "MOST_ADAPTERS", 21)
    assert (
        await refused(registry.load("more", "a0"), "21 adapters are loaded, as many as there may be")
        == Outcome.REJECTED
    )
    monkeypatch.setattr(AdapterRegistry, "most_reading", 0)
    assert await refused(registry.load("a0", "a0", in_place=True), "retry later") == Outcome.SHED


async def test_a_file_that_cannot_be_written_changes_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_folder(house.more / "sql")
    registry = await house.open()
    await registry.load("sql", "sql")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderStorage, "create", full)
    assert (
        await refused(registry.load("two", "sql"), "nothing was changed.*No space left on device")
        == Outcome.UNAVAILABLE
    )
    assert await refused(registry.unload("sql"), "nothing was changed") == Outcome.UNAVAILABLE
    assert names(registry) == ["sql"]
    [shown] = registry.catalog.problems
    assert "adapters that clients load or unload cannot be stored" in shown
    assert "No space left on device" in shown
    monkeypatch.undo()
    await registry.load("three", "sql")
    assert not registry.catalog.problems
    assert names(await house.open()) == ["sql", "three"]


async def test_a_client_that_leaves_leaves_memory_and_disk_agreeing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_folder(house.more / "sql")
    registry = await house.open()
    writing = asyncio.Event()
    write, loop = Record.write, asyncio.get_running_loop()

    def slow(*arguments: Any) -> None:
        loop.call_soon_threadsafe(writing.set)
        write(*arguments)

    monkeypatch.setattr(Record, "write", slow)
    load = asyncio.create_task(registry.load("sql", "sql"))
    await writing.wait()
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await until(lambda: names(registry))
    assert names(await house.open()) == ["sql"]


async def test_what_earlier_versions_kept_in_a_file_is_taken_over_once(house: House, files: Files) -> None:
    adapter_folder(house.more / "sql")
    await (await house.open()).load("sql", "sql")
    files["chat.json"] = json.dumps({"format": 1, "service": "chat", **house.kept()})
    house.state = house.folder / "another"
    house.state.mkdir()
    registry = await house.open()
    assert names(registry) == ["sql"]
    assert list(files) == ["chat.json.taken-over"]
    await registry.unload("sql")
    files["chat.json"] = files["chat.json.taken-over"]
    assert names(await house.open()) == []


async def test_a_broken_file_of_earlier_versions_is_put_aside(house: House, files: Files) -> None:
    files["chat.json"] = '{"format": 1, "base'
    registry = await house.open()
    [problem] = registry.catalog.problems
    assert "chat.json is no registry (Invalid JSON" in problem
    assert dict(files) == {"chat.json.broken": '{"format": 1, "base'}
    adapter_folder(house.more / "sql")
    await registry.load("sql", "sql")
    assert house.kept()["loaded"]["sql"]["folder"] == str(house.more / "sql")


async def test_what_is_of_another_form_is_not_overwritten(house: House) -> None:
    adapter_folder(house.adapters / "sql")
    house.store({"loaded": []})
    registry = await house.open()
    assert names(registry) == ["sql"]
    [problem] = registry.catalog.problems
    assert "the state registries/chat is not of this version's form (" in problem
    assert await refused(registry.unload("sql"), "nothing was changed, because the state") == Outcome.UNAVAILABLE
    assert house.kept() == {"loaded": []}


async def test_what_another_version_has_beside_is_ignored(house: House) -> None:
    adapter_folder(house.more / "sql")
    await (await house.open()).load("sql", "sql")
    kept = house.kept()
    newer = {name: {**entry, "owner": "somebody"} for name, entry in kept["loaded"].items()}
    house.store({**kept, "loaded": newer, "quota": 7})
    assert names(await house.open()) == ["sql"]


async def test_what_was_kept_is_checked_again(house: House) -> None:
    """By the configuration always; by its files when the model is another one."""
    for name, rank in (("low", 4), ("high", 16), ("gone", 4)):
        adapter_folder(house.more / name, rank=rank)
    registry = await house.open()
    for name in ("low", "high", "gone"):
        await registry.load(name, name)
    (house.more / "gone").rename(house.folder / "gone")
    registry = await house.open(max_rank=8)
    assert names(registry) == ["low"]
    assert len(registry.catalog.problems) == 2
    (house.folder / "gone").rename(house.more / "gone")
    assert names(await house.open()) == ["gone", "high", "low"], "the file has not forgotten them"
    house.model = model_folder(house.folder / "wide", hidden_size=32)
    adapter_folder(house.more / "low", hidden=32)
    registry = await house.open()
    assert names(registry) == ["low"]
    assert all(f"loaded earlier for {house.folder / 'model'}" in problem for problem in registry.catalog.problems)


async def test_thousands_cost_their_metadata_only(house: House) -> None:
    """All share one folder's files, so that the test is quick; each name costs an entry."""
    adapter_folder(house.more / "sql")
    registry = await house.open()
    await registry.load("sql", "sql")
    kept = house.kept()
    house.store({**kept, "loaded": dict.fromkeys(MANY, kept["loaded"]["sql"])})
    registry = await house.open()
    assert len(registry.catalog.entries) == len(MANY)
    news = await registry.catalog.follow("g", ("", -1), 0)
    assert (len(news.changes), news.whole) == (len(MANY), True)
    await registry.unload(MANY[0])
    later = await registry.catalog.follow("g", (news.life, news.version), 0)
    assert (dict(later.changes), later.whole) == ({MANY[0]: None}, False), "news are what changed"


MANY = [f"tenant-{index}" for index in range(2000)]


def entry(name: str) -> Registered:
    adapter: Any = name
    return Registered("chat", adapter, 0)


async def test_news_are_what_changed_since() -> None:
    catalog = Catalog(gone_s=10)
    catalog.put({"a": entry("a")})
    first = await catalog.follow("g", ("another life", 7), 5)
    assert (first.whole, dict(first.changes)) == (True, {"a": entry("a")})
    waiting = asyncio.create_task(catalog.follow("g", (first.life, first.version), 5))
    await asyncio.sleep(0)
    catalog.put({"b": entry("b"), "a": None})
    catalog.put({"b": entry("c")})
    catalog.complain("p")
    second = await waiting
    assert not second.whole
    assert dict(second.changes) in ({"a": None, "b": entry("b")}, {"a": None, "b": entry("c")})
    third = await catalog.follow("g", (first.life, first.version), 0)
    assert dict(third.changes) == {"a": None, "b": entry("c")}
    assert third.problems == ("p",)
    idle = await catalog.follow("g", (third.life, third.version), 0.01)
    assert (idle.changes, idle.version) == ({}, third.version)


async def test_who_missed_too_much_is_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.deployments.serving.catalog.catalog._REMEMBERED", 3)
    catalog = Catalog(gone_s=10)
    life = (await catalog.follow("g", ("", -1), 0)).life
    for index in range(5):
        catalog.put({f"a{index}": entry("x")})
    for seen, expected in ((1, 5), (2, 3), (5, 0)):
        news = await catalog.follow("g", (life, seen), 0)
        assert (len(news.changes), news.whole) == (expected, seen == 1)


async def test_a_change_waits_for_the_gateways_that_are_there() -> None:
    now = 0.0
    catalog = Catalog(gone_s=10, clock=lambda: now)
    for gateway in "ab":
        await catalog.follow(gateway, ("", -1), 0)
    life = (await catalog.follow("a", ("", -1), 0)).life
    catalog.put({"x": entry("x")})
    waiting = asyncio.create_task(catalog.spread(5))
    await catalog.follow("a", (life, 1), 0)
    for _ in range(10):
        await asyncio.sleep(0)  # whoever can go on does so within a few turns
    assert not waiting.done(), "b has not heard"
    await catalog.follow("b", (life, 1), 0)
    await waiting
    catalog.put({"y": entry("y")})
    await catalog.spread(0.01)
    now = 11.0
    await catalog.spread(5)


MINE, OTHER = Manager("mine", False), Manager("other", False)


async def test_an_adapter_is_its_tenant_s(house: House) -> None:
    for name in ("found",):
        adapter_folder(house.adapters / name)
    for name in ("sql", "law"):
        adapter_folder(house.more / name)
    registry = await house.open()
    entry = await registry.load("a", "sql", by=MINE)
    assert entry.owner == "mine"
    for planners in range(2):
        if planners:
            registry = await house.open()
        for name, reason in (("a", "another tenant loaded it"), ("found", "no tenant loaded it")):
            assert await refused(registry.unload(name, by=OTHER), reason) is Fault.FORBIDDEN
            assert await refused(registry.load(name, "law", None, True, by=OTHER), "'manage-all'") is Fault.FORBIDDEN
        assert registry.catalog.entries["a"] == entry
    await registry.load("a", "law", None, True, by=MINE)
    await registry.unload("a", by=MINE)
    await registry.load("b", "law", by=MINE)
    await registry.unload("b", by=OPERATOR)
    await registry.unload("found", by=OPERATOR)


async def test_an_adapter_that_cannot_be_served_now_is_its_tenant_s_all_the_same(house: House) -> None:
    folder = adapter_folder(house.more / "sql")
    adapter_folder(house.more / "law")
    await (await house.open()).load("a", "sql", by=MINE)
    folder.rename(house.folder / "away")
    registry = await house.open()
    assert names(registry) == []
    assert await refused(registry.load("a", "law", by=OTHER), "another tenant loaded it") is Fault.FORBIDDEN
    assert await refused(registry.unload("a", by=OTHER), "another tenant loaded it") is Fault.FORBIDDEN
    await registry.unload("a", by=MINE)


@pytest.mark.parametrize("named", ["chat", None])
async def test_adapters_are_loaded_for_services_that_one_may_use(house: House, named: str | None) -> None:
    adapter_folder(house.more / "sql")
    registry = await house.open()
    elsewhere = Manager("mine", False, ("topics",))
    assert await refused(registry.load("a", "sql", named, by=elsewhere), "may not use") is Fault.FORBIDDEN
    await registry.load("a", "sql", named, by=Manager("mine", False, ("chat",)))


async def test_adapters_of_services_that_one_may_not_use_stay(house: House) -> None:
    adapter_folder(house.more / "sql")
    registry = await house.open()
    await registry.load("a", "sql", by=MINE)
    elsewhere = Manager("admin", True, ("topics",))
    assert await refused(registry.unload("a", by=elsewhere), "of chat, which tenant admin may not") is Fault.FORBIDDEN
    assert names(registry) == ["a"]


class Bucket:
    """Adapters on object storage, and a house that may load from there."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.url = f"memory://adapters/{house.folder.name}"
        self.files: Any = fsspec.filesystem("memory")

    def put(self, name: str, **options: Any) -> None:
        made = adapter_folder(self.house.folder / "made" / name, **options)
        self.files.put(str(made), f"{self.url}/{name}", recursive=True)

    async def open(self) -> AdapterRegistry:
        return await self.house.open(roots=[self.url])


@pytest.fixture
def bucket(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    return Bucket(house)


async def test_an_adapter_is_loaded_from_object_storage(bucket: Bucket) -> None:
    bucket.put("sql", rank=2)
    registry = await bucket.open()
    entry = await registry.load("my-sql", f"{bucket.url}/sql")
    assert entry.adapter.folder.startswith(f"{bucket.url}/sql#")
    read = read_adapter(entry.adapter.folder, registry_shape(bucket.house))
    assert (read.revision, read.ranks) == (entry.adapter.revision, entry.adapter.ranks)
    again = await bucket.open()
    assert again.catalog.entries == {"my-sql": entry}


async def test_one_that_was_changed_there_is_another_once_it_is_loaded_again(bucket: Bucket) -> None:
    bucket.put("sql", rank=2)
    registry = await bucket.open()
    first = await registry.load("sql", f"{bucket.url}/sql")
    bucket.files.rm(f"{bucket.url}/sql", recursive=True)
    bucket.put("sql", rank=4)
    second = await registry.load("sql", f"{bucket.url}/sql", in_place=True)
    assert (first.adapter.rank, second.adapter.rank) == (2, 4)
    assert second.adapter.folder != first.adapter.folder


@pytest.mark.parametrize(
    ("path", "said"),
    [("memory://others/sql", "lies outside"), ("{url}/../sql", "lies outside"), ("{url}/none", "has not all files")],
)
async def test_what_object_storage_has_not_or_may_not_is_refused(bucket: Bucket, path: str, said: str) -> None:
    registry = await bucket.open()
    await refused(registry.load("sql", path.format(url=bucket.url)), said)
    assert "sql" not in registry.catalog.entries


async def test_one_that_is_too_large_is_not_fetched(bucket: Bucket) -> None:
    bucket.put("sql")
    bucket.files.pipe(f"{bucket.url}/sql/{WEIGHTS}", bytes(64 * 2**20))
    registry = await bucket.open()
    await refused(registry.load("sql", f"{bucket.url}/sql"), "at most")


def registry_shape(house: House) -> DecoderShape:
    return sources.check_decoder(house.model)
