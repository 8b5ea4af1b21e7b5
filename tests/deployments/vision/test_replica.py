"""What a vision replica counts and reports of itself, and when it had better be replaced; without Ray and a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.scripted_vision import report

from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk
from pliant.deployments.vision.messages import Answer, Query
from pliant.deployments.vision.replica import VisionReplica
from pliant.deployments.vision.report import EngineReport, ReplicaReport
from pliant.formats.vision_task import TaskRef

QUERY = Query(b"", TaskRef("a", "/a", "1", 2, ()), 1.0, 1.0)
PARCEL = Parcel("r", "g", (QUERY,))


class Engine:
    failure: Exception | None = None
    seconds = 0.0
    raises: Exception | None = None

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def classify(self, query: Query) -> Answer:
        await self.gate.wait()
        if self.raises:
            raise self.raises
        return Answer(b"", 0, "in_time", 1)

    def computing_s(self) -> float:
        return self.seconds

    def report(self) -> EngineReport:
        given: Any = report()
        return cast(EngineReport, {key: given[key] for key in EngineReport.__annotations__} | {"in_time": 5, "late": 2})


class Following:
    ended = False

    def done(self) -> bool:
        return self.ended


def replica() -> Any:
    made: Any = VisionReplica.__new__(VisionReplica)
    made._engine, made._following = Engine(), Following()
    made._desk = Desk("digits", made._engine.classify)
    made._reconciler = SimpleNamespace(failed={QUERY.task: "is broken"})
    made._assembled = SimpleNamespace(useful=SimpleNamespace(dropped=lambda: {2: 0}), compiling=False)
    return made


async def test_images_are_held_by_gateway_until_they_are_answered() -> None:
    made = replica()
    one = asyncio.create_task(made.answer(PARCEL))
    many = asyncio.create_task(anext(made.answers(Parcel("r", "another", (QUERY, QUERY)))))
    await asyncio.sleep(0.01)
    told: ReplicaReport = made.record_replica_metadata()
    assert told["held"] == {"g": 1, "another": 2}
    made._engine.gate.set()
    assert isinstance(await one, Answer)
    assert sorted(index for index, _ in await many) == [0, 1]
    told = made.record_replica_metadata()
    assert told["held"] == {}
    assert (told["served"], told["failed_tasks"], told["dropped"]) == (7, {"a": "is broken"}, {2: 0})


async def test_what_it_raises_is_told_and_makes_it_ill() -> None:
    made = replica()
    made._engine.gate.set()
    made._engine.raises = ValueError("a bug")
    for _ in range(3):
        await made.check_health()
        assert await made.answer(PARCEL) == Refusal("failed", "ValueError: a bug")
    with pytest.raises(RuntimeError, match="3 queries in a row broke down, the last with ValueError: a bug"):
        await made.check_health()


async def test_health() -> None:
    made = replica()
    await made.check_health()
    made._engine.seconds = 61
    with pytest.raises(RuntimeError, match="one batch has taken 61 s"):
        await made.check_health()
    made._engine.failure = OSError("no memory")
    with pytest.raises(OSError, match="no memory"):
        await made.check_health()
    made._engine = Engine()
    made._following.ended = True
    with pytest.raises(RuntimeError, match="not followed any more"):
        await made.check_health()
