"""Replicas of any kind listen, say where, and end once their calls have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from support.waiting import until

from pliant.deployments.serving.line import connected
from pliant.deployments.serving.listening import LINE, address, listening
from pliant.deployments.serving.parcels import Parcel

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__:RuntimeWarning")
"""Serve awaits it, and the garbage collector cannot."""


class Kind:
    """The replica of some kind."""

    def __init__(self, service: str, config: Any) -> None:
        self.made_with = service, config
        self.go_on = asyncio.Event()
        self.ended = False

    async def answer(self, parcel: Parcel[Any]) -> Any:
        await self.go_on.wait()
        return parcel.queries[0]

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"version": 0}

    def __del__(self) -> None:
        self.ended = True


class SlowlyMade(Kind):
    """Has a constructor that Serve awaits."""

    async def __init__(self, service: str, config: Any) -> None:  # type: ignore[misc]
        await asyncio.sleep(0)
        super().__init__(service, config)


async def made(kind: type) -> Any:
    cls = listening(kind, 10)
    replica = cls.__new__(cls)
    await replica.__init__("s", {})
    return replica


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


@pytest.mark.parametrize("kind", [Kind, SlowlyMade])
async def test_it_says_where_and_ends_after_its_calls(kind: type) -> None:
    replica = await made(kind)
    assert replica.made_with == ("s", {})
    metadata = replica.record_replica_metadata()
    where = address(metadata)
    assert metadata == {"version": 0}, "the secret is in nobody's statistics"
    assert where
    line = await connected(where)
    assert line
    call = asyncio.create_task(line.call("answer", Parcel("a", "g", (1,))))
    await until(lambda: replica._listener._under_way)
    end = asyncio.create_task(replica.__del__())
    await asyncio.sleep(0.01)
    assert not replica.ended
    replica.go_on.set()
    assert await call == 1
    await end
    assert replica.ended
    line.close()


@pytest.mark.parametrize("tls", ["1", "true"])
async def test_where_ray_encrypts_there_is_no_line(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", tls)
    replica = await made(Kind)
    metadata = replica.record_replica_metadata()
    assert LINE not in metadata
    assert address(metadata) is None
    await replica.__del__()
