"""A planner stops while it loads or unloads an adapter: as soon as there is another one, that finishes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.adapter_house import House, names
from support.peft_folders import adapter_folder

from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.llm.adapter_registry import AdapterRegistry
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.follower import Follower
from pliant.deployments.serving.messages import OPERATOR, Guidance, News
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

pytestmark = pytest.mark.virtual_time

REPLACED_AFTER_S = 8.0


class Planner:
    """Of an epoch, with a registry of adapters; it may stop before or after it does what it is asked to."""

    def __init__(self, epoch: int, registry: AdapterRegistry) -> None:
        self.epoch = epoch
        self.registry = registry
        self.part: CatalogPart[Any] = CatalogPart(registry)
        self.stops = ""
        self.runs = asyncio.Event()
        self.runs.set()

    async def ask(self, method: str, *what: Any) -> Any:
        if method != "news" and self.stops == "before":
            self.runs.clear()
        await self.runs.wait()
        done = await getattr(self.part, method)(*what)
        if method != "news" and self.stops == "after":
            self.runs.clear()
        await self.runs.wait()
        return done

    async def exchange(self, seen: str) -> tuple[str, Mapping[str, Guidance]]:
        if seen == str(self.epoch):
            await asyncio.sleep(1)
        await self.runs.wait()
        return str(self.epoch), {"chat": Guidance(epoch=self.epoch)}


class Cluster:
    """The planner of the day, and a gateway's followers of it."""

    def __init__(self, house: House, first: AdapterRegistry) -> None:
        self.house = house
        self.planner = Planner(1, first)
        self.follower = Follower("me", self.exchange, {}, {})
        self.adapters = self.another()
        self.running = [asyncio.create_task(each.run()) for each in (self.follower, self.adapters)]

    async def exchange(self, _me: str, seen: str, _news: Mapping[str, News]) -> tuple[str, Mapping[str, Guidance]]:
        return await self.planner.exchange(seen)

    def another(self) -> AdapterFollower:
        """A follower that knows nothing yet."""
        return AdapterFollower(lambda method, *what: self.follower.while_it_lasts(self.planner.ask(method, *what)))

    async def replace(self) -> None:
        """As Serve does with a planner that does not answer."""
        await asyncio.sleep(REPLACED_AFTER_S)
        self.planner = Planner(2, await self.house.open())


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    house = House(tmp_path)
    for name, rank in (("law", 4), ("sql", 8)):
        adapter_folder(house.more / name, rank)
    made = Cluster(house, await house.open())
    await asyncio.sleep(3)
    yield made
    for task in made.running:
        task.cancel()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("stops", ["before", "after"])
async def test_a_load_goes_on_with_the_next_planner(cluster: Cluster, stops: str, in_place: bool) -> None:
    cluster.planner.stops = stops
    began = asyncio.get_running_loop().time()
    replacing = asyncio.create_task(cluster.replace())
    entry = await cluster.adapters.load("law", "law", None, in_place)
    assert asyncio.get_running_loop().time() - began < REPLACED_AFTER_S + 6
    await replacing
    assert entry.adapter.rank == 4
    assert cluster.adapters.known == {"law": entry}
    assert names(await cluster.house.open()) == ["law"]


@pytest.mark.parametrize("stops", ["before", "after"])
async def test_an_unload_goes_on_with_the_next_planner(cluster: Cluster, stops: str) -> None:
    entry = await cluster.adapters.load("law", "law", None, False)
    cluster.planner.stops = stops
    replacing = asyncio.create_task(cluster.replace())
    assert await cluster.adapters.unload("law") == entry
    await replacing
    assert cluster.adapters.known == {}
    assert names(await cluster.house.open()) == []


async def test_of_what_a_gateway_did_not_know_it_does_not_say_that_it_unloaded_it(cluster: Cluster) -> None:
    await cluster.adapters.load("law", "law", None, False)
    cluster.planner.stops = "after"
    replacing = asyncio.create_task(cluster.replace())
    with pytest.raises(RequestError, match=r"the planner was replaced meanwhile; see /v1/models") as error:
        await cluster.another().unload("law")
    assert error.value.outcome is Outcome.UNAVAILABLE
    await replacing


async def test_another_s_adapter_of_that_name_stays(cluster: Cluster) -> None:
    """That somebody loaded while the planner was away, over another gateway."""
    cluster.planner.stops = "before"

    async def replace() -> None:
        await asyncio.sleep(REPLACED_AFTER_S)
        registry = await cluster.house.open()
        await registry.load("law", "sql")
        cluster.planner = Planner(2, registry)

    replacing = asyncio.create_task(replace())
    with pytest.raises(RequestError, match="is loaded already") as error:
        await cluster.adapters.load("law", "law", None, False)
    assert error.value.outcome is Outcome.REJECTED
    await replacing
    assert cluster.planner.registry.catalog.entries["law"].adapter.rank == 8


async def test_what_is_loaded_again_is_what_was_loaded(tmp_path: Path) -> None:
    house = House(tmp_path)
    adapter_folder(house.more / "law")
    registry = await house.open()
    first = await registry.load("law", "law", by=OPERATOR)
    assert (await registry.load("law", "law", again=True)).adapter == first.adapter
    adapter_folder(house.more / "law", rank=8)
    part: CatalogPart[Any] = CatalogPart(registry)
    refusal = await part.load("law", "law", None, False, OPERATOR, True)
    assert refusal.outcome is Outcome.REJECTED
    assert refusal.fault is not Fault.NOT_FOUND
