"""A gateway follows the registry of adapters: it hears of changes, asks about unknown names, and bears its absence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.waiting import until

from pliant.deployments.llm import adapter_follower
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.llm.messages import Registered
from pliant.deployments.serving.catalog import follower as catalog_follower
from pliant.deployments.serving.catalog.catalog import Catalog, Seen
from pliant.deployments.serving.messages import CatalogNews, Manager, Rejected
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.formats.adapter_info import AdapterRef

pytestmark = pytest.mark.virtual_time


def entry(name: str, revision: str = "1") -> Registered:
    return Registered("chat", AdapterRef(name, f"/adapters/{name}", revision, (8,) * 7), 5)


class Registry:
    """The planner's part, which can die, and comes back as another life."""

    def __init__(self) -> None:
        self.catalog: Catalog[Registered] = Catalog(gone_s=10)
        self.dead = False
        self.asked = 0
        self.hangs = False

    def restart(self) -> None:
        entries = self.catalog.entries
        self.catalog = Catalog(gone_s=10)
        self.catalog.put(dict(entries))
        self.dead = False

    async def __call__(self, method: str, *args: Any) -> Any:
        """As `kind.Ask`."""
        await self._reach()
        return await getattr(self, method)(*args)

    async def news(self, gateway: str, seen: Seen, wait: bool) -> CatalogNews[Registered]:
        self.asked += not wait
        return await self.catalog.follow(gateway, seen, 0.5 if wait else 0)

    async def load(
        self, name: str, path: str, service: str | None, in_place: bool, by: Manager
    ) -> Registered | Rejected:
        if path == "wrong":
            return Rejected(Outcome.REJECTED, "outside", "lora_path", Fault.FORBIDDEN)
        self.catalog.put({name: entry(name, path)})
        return entry(name, path)

    async def unload(self, name: str, by: Manager) -> Registered | Rejected:
        known = self.catalog.entries[name]
        self.catalog.put({name: None})
        return known

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise RuntimeError("the actor died")


@asynccontextmanager
async def following(registry: Registry) -> AsyncIterator[AdapterFollower]:
    follower = AdapterFollower(registry)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_follower, "_RETRY_S", 0.01)


async def test_changes_arrive_unasked() -> None:
    registry = Registry()
    registry.catalog.put({"a": entry("a"), "b": entry("b")})
    async with following(registry) as follower:
        await until(lambda: set(follower.known) == {"a", "b"})
        registry.catalog.put({"a": None, "b": entry("b", "2"), "c": entry("c")})
        registry.catalog.complain("p")
        await until(lambda: follower.problems == ("p",))
        assert follower.known == {"b": entry("b", "2"), "c": entry("c")}
        assert follower.reached
    assert registry.asked == 0


async def test_what_was_loaded_is_known_at_once_everywhere() -> None:
    registry = Registry()
    mine, other = AdapterFollower(registry), AdapterFollower(registry)
    await mine.load("a", "2", None, False)
    assert mine.known == {"a": entry("a", "2")}
    assert await other.find("a") == entry("a", "2")
    await mine.unload("a")
    assert await mine.find("a") is None


async def test_errors_of_the_registry_reach_the_client() -> None:
    with pytest.raises(RequestError, match="outside") as error:
        await AdapterFollower(Registry()).load("a", "wrong", None, False)
    assert (error.value.fault, error.value.param) == (Fault.FORBIDDEN, "lora_path")


async def test_unknown_names_however_many_are_asked_about_together() -> None:
    registry = Registry()
    registry.catalog.put({"a": entry("a")})
    follower = AdapterFollower(registry)
    found = await asyncio.gather(*(follower.find(name) for name in ["a", *map(str, range(500))]))
    assert found == [entry("a"), *[None] * 500]
    assert registry.asked == 1
    first = asyncio.create_task(follower.find("b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    registry.catalog.put({"b": entry("b"), "c": entry("c")})
    assert await asyncio.gather(*(follower.find("c") for _ in range(50))) == [entry("c")] * 50
    await first
    assert registry.asked <= 3, "those who came while the first was under way shared the next"


async def test_who_leaves_takes_nobody_along() -> None:
    registry = Registry()
    follower = AdapterFollower(registry)
    leaves, stays = (asyncio.create_task(follower.find("a")) for _ in range(2))
    await asyncio.sleep(0)
    registry.catalog.put({"a": entry("a")})
    leaves.cancel()
    assert await stays == entry("a")


async def test_without_the_planner_what_is_known_goes_on() -> None:
    registry = Registry()
    registry.catalog.put({"a": entry("a")})
    async with following(registry) as follower:
        await until(lambda: bool(follower.known))
        registry.dead = True
        await until(lambda: not follower.reached)
        assert await follower.find("a") == entry("a")
        calls: list[Any] = [follower.find("b"), follower.load("b", "1", None, False), follower.unload("a")]
        for call in calls:
            with pytest.raises(RequestError, match="planner") as error:
                await call
            assert error.value.outcome == Outcome.UNAVAILABLE
            assert error.value.retry_after_s
        registry.catalog.put({"a": None, "c": entry("c")})
        registry.restart()
        await until(lambda: set(follower.known) == {"c"})
        assert follower.reached


async def test_a_planner_that_hangs_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_follower, "_CATCH_UP_WITHIN_S", 0.05)
    monkeypatch.setattr(adapter_follower, "_CHANGE_WITHIN_S", 0.05)
    registry = Registry()
    registry.hangs = True
    follower = AdapterFollower(registry)
    for call in (follower.find("a"), follower.load("a", "1", None, False)):
        with pytest.raises(RequestError) as error:
            await call
        assert error.value.outcome == Outcome.UNAVAILABLE


async def test_old_news_never_undo_newer_ones() -> None:
    """Two calls may be under way, and a planner that has died may be the last to answer."""
    told: list[tuple[CatalogNews[Registered], dict[str, Registered]]] = [
        (CatalogNews("life", 5, {"a": entry("a", "5")}, True, ()), {"a": entry("a", "5")}),
        (CatalogNews("life", 4, {"a": None}, False, ()), {"a": entry("a", "5")}),
        (CatalogNews("older life", 9, {"a": None}, False, ()), {"a": entry("a", "5")}),
        (CatalogNews("life", 7, {"a": None, "b": entry("b")}, False, ()), {"b": entry("b")}),
        (CatalogNews("newer life", 0, {}, True, ()), {}),
    ]
    coming = iter(told)

    async def ask(method: str, *args: Any) -> CatalogNews[Registered]:
        return next(coming)[0]

    follower = AdapterFollower(ask)
    for _, known in told:
        assert await follower.catch_up()
        assert follower.known == known


async def test_news_that_a_stopped_planner_gives_late_are_not_taken() -> None:
    late = asyncio.Event()

    async def ask(method: str, me: str, seen: Seen, wait: bool) -> CatalogNews[Registered]:
        if wait:
            await late.wait()
            return CatalogNews("stopped", 5, {"a": entry("a")}, True, ())
        return CatalogNews("next", 2, {"b": entry("b")}, True, ())

    follower = AdapterFollower(ask)
    waiting = asyncio.create_task(follower.ask(wait=True, within_s=60))
    await asyncio.sleep(0)
    assert await follower.catch_up()
    late.set()
    assert await waiting
    assert follower.known == {"b": entry("b")}
