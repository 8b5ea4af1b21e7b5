"""Stand-ins for what a gateway's vision service talks to: a planner with a catalog of tasks, and obedient replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from support.call_path import Played, Recorder

from pliant.config.vision import VisionConfig
from pliant.deployments.serving.catalog.catalog import Catalog, Seen
from pliant.deployments.serving.messages import CatalogNews, Manager, Rejected
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.vision.endpoint import VisionClassifier
from pliant.deployments.vision.messages import Answer, Query, RegisteredTask
from pliant.deployments.vision.report import ReplicaReport
from pliant.deployments.vision.task_follower import TaskFollower
from pliant.formats.vision_task import TaskRef
from pliant.models.vision_info import VisionInfo

INFO = VisionInfo(
    architecture="vit_tiny_patch16_224",
    height=8,
    width=8,
    channels=3,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    interpolation="bilinear",
    crop_pct=1.0,
    squash=False,
    labels=(),
    layers=2,
    hidden=8,
    patch=4,
    prefix=1,
)
Reply = Answer | Refusal | Exception


def task(name: str = "parity", labels: tuple[str, ...] = ("even", "odd"), service: str = "digits") -> RegisteredTask:
    ref = TaskRef(name, f"/tasks/{name}", "1", len(labels), (2,))
    return RegisteredTask(service, ref, labels, 500.0, 1.0, 7)


class TaskPlanner:
    """The planner's part: keeps a catalog of tasks; loads what lies at /tasks, and can be dead."""

    def __init__(self, *entries: RegisteredTask) -> None:
        self.catalog: Catalog[RegisteredTask] = Catalog(gone_s=10)
        self.catalog.put({f"{entry.service}/{entry.task.name}": entry for entry in entries})
        self.dead = False

    async def __call__(self, method: str, *args: Any) -> Any:
        """As `kind.Ask`."""
        if self.dead:
            raise ConnectionError("dead")
        return await getattr(self, method)(*args)

    async def news(self, follower: str, seen: Seen, wait: bool) -> CatalogNews[RegisteredTask]:
        return await self.catalog.follow(follower, seen, 5 if wait else 0)

    async def load(self, service: str, name: str, path: str, replace: bool, by: Manager) -> RegisteredTask | Rejected:
        if not path.startswith("/tasks/"):
            return Rejected(Outcome.REJECTED, f"path: {path!r} lies outside", fault=Fault.FORBIDDEN)
        entry = task(name, service=service)
        self.catalog.put({f"{service}/{name}": entry})
        return entry

    async def unload(self, service: str, name: str, by: Manager) -> RegisteredTask | Rejected:
        if (entry := self.catalog.entries.get(f"{service}/{name}")) is None:
            return Rejected(Outcome.REJECTED, f"task: {service} has no {name!r}", fault=Fault.NOT_FOUND)
        self.catalog.put({f"{service}/{name}": None})
        return entry


def brightness(query: Query) -> Answer:
    """Logits [brightness, 1 - brightness] of the image, 0 for the further labels."""
    bright = float(np.frombuffer(query.image, dtype=np.uint8).mean() / 255)
    logits = [bright, 1 - bright, *[0.0] * (query.task.labels - 2)]
    return Answer(np.array(logits, dtype="<f4").tobytes(), -4, "in_time", 3)


class ImageRecorder(Recorder):
    arrivals = 0

    def arrived(self) -> None:
        self.arrivals += 1

    def answered(self, seconds: float, in_time: bool) -> None:
        self.events.append(("answered", in_time))


class Replicas(Played[Query, Answer, ReplicaReport, ImageRecorder]):
    """Give the scripted replies in turn, the last for ever; without any they look at the brightness."""

    def __init__(self, *replies: Reply | Callable[[Query], Reply], names: Iterable[str] = "abc") -> None:
        self.replies = list(replies or [brightness])
        self.asked: list[str] = []
        """The replicas, in order."""
        self.queries: list[Query] = []
        """That they were asked."""
        super().__init__(names, report, ImageRecorder())

    async def one(self, parcel: Parcel[Query]) -> Answer | Refusal:
        [query] = parcel.queries
        self.asked.append(parcel.replica)
        self.queries.append(query)
        await asyncio.sleep(0)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if callable(reply):
            reply = reply(query)
        if isinstance(reply, Exception):
            raise reply
        return reply


class Silent(Replicas):
    """Never reply."""

    async def one(self, parcel: Parcel[Query]) -> Answer | Refusal:
        self.asked.append(parcel.replica)
        await asyncio.Event().wait()
        raise AssertionError


def report(**held: float) -> ReplicaReport:
    return ReplicaReport(
        version=0,
        held=held,
        served=0,
        compiling=False,
        backend="eager",
        gamma=0,
        gammas={},
        waiting=0,
        running=0,
        tenants={},
        in_time=0,
        late=0,
        evicted=0,
        shed=0,
        failed=0,
        utility=0.0,
        slowdown=1.0,
        decision_p99_ms=0.0,
        p50_ms=0.0,
        p98_ms=0.0,
        earnings=[],
        slo_s=0.0,
        tasks=[],
        dropped={},
        failed_tasks={},
    )


def service(
    replicas: Replicas | None = None, planner: TaskPlanner | None = None, **options: Any
) -> tuple[VisionClassifier, Replicas, TaskFollower]:
    config = VisionConfig(kind="vision", model="m", tasks="tasks", **options)
    follower = TaskFollower(planner or TaskPlanner(task()))
    way = replicas or Replicas()
    return VisionClassifier("digits", config, INFO, 1, follower, way.table, way.caller, way.recorder), way, follower
