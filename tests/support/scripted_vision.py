"""Stand-ins for what a gateway's vision service talks to: a planner with a board of tasks, and obedient replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from pliant.deployments.serving.catalog.task_follower import TaskFollower
from pliant.deployments.vision.routing_table import VisionRoutingTable

from pliant.config.cluster import VisionConfig
from pliant.deployments.serving.catalog.board import Board, Seen
from pliant.deployments.serving.messages import RegisteredTask, Rejected, TaskNews
from pliant.deployments.serving.outcome import Fault, Outcome, Retry
from pliant.deployments.vision.endpoint import VisionClassifier
from pliant.deployments.vision.messages import Answer, Refusal, Ticket
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
    """Has a board of tasks; loads what lies at /tasks, and can be dead."""

    def __init__(self, *entries: RegisteredTask) -> None:
        self.board: Board[RegisteredTask] = Board(gone_s=10)
        self.board.put({f"{entry.service}/{entry.task.name}": entry for entry in entries})
        self.dead = False

    async def task_news(self, follower: str, seen: Seen, wait: bool) -> TaskNews:
        self._check()
        return await self.board.follow(follower, seen, 5 if wait else 0)

    async def load_task(self, service: str, name: str, path: str, replace: bool) -> RegisteredTask | Rejected:
        self._check()
        if not path.startswith("/tasks/"):
            return Rejected(Outcome.REJECTED, f"path: {path!r} lies outside", fault=Fault.FORBIDDEN)
        entry = task(name, service=service)
        self.board.put({f"{service}/{name}": entry})
        return entry

    async def unload_task(self, service: str, name: str) -> RegisteredTask | Rejected:
        self._check()
        if (entry := self.board.entries.get(f"{service}/{name}")) is None:
            return Rejected(Outcome.REJECTED, f"task: {service} has no {name!r}", fault=Fault.NOT_FOUND)
        self.board.put({f"{service}/{name}": None})
        return entry

    def _check(self) -> None:
        if self.dead:
            raise ConnectionError("dead")


class Recorder:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.ends: list[Outcome] = []

    def answered(self, task: str, seconds: float, in_time: bool, gamma: int) -> None:
        self.events.append(("answered", task, in_time, gamma))

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome)

    def retried(self, why: Retry) -> None:
        self.events.append(why)


def brightness(ticket: Ticket) -> Answer:
    """Logits [brightness, 1 - brightness] of the image, 0 for the further labels."""
    bright = float(np.frombuffer(ticket.query.image, dtype=np.uint8).mean() / 255)
    logits = [bright, 1 - bright, *[0.0] * (ticket.query.task.labels - 2)]
    return Answer(np.array(logits, dtype="<f4").tobytes(), -4, "in_time", 3)


class Replicas:
    """Gives the scripted replies in turn, the last for ever; without any it looks at the brightness."""

    def __init__(self, *replies: Reply | Callable[[Ticket], Reply]) -> None:
        self.replies = list(replies or [brightness])
        self.tickets: list[Ticket] = []

    async def __call__(self, ticket: Ticket) -> Answer | Refusal:
        self.tickets.append(ticket)
        await asyncio.sleep(0)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if callable(reply):
            reply = reply(ticket)
        if isinstance(reply, Exception):
            raise reply
        return reply


def service(
    replicas: Replicas | None = None,
    planner: TaskPlanner | None = None,
    names: tuple[str, ...] = ("a", "b", "c"),
    **options: Any,
) -> tuple[VisionClassifier, Recorder, VisionRoutingTable, TaskFollower]:
    config = VisionConfig(kind="vision", model="m", tasks="tasks", **options)
    follower = TaskFollower(planner or TaskPlanner(task()))
    table, recorder = VisionRoutingTable(), Recorder()
    table.sync(dict.fromkeys(names))
    classifier = VisionClassifier("digits", config, INFO, 1, follower, table, replicas or Replicas(), recorder)
    return classifier, recorder, table, follower
