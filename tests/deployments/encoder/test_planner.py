"""The encoders' part of the planner: services are planned for as soon as some replica can say what it may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.doubles import profile, report

from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.messages import Assignment, Report
from pliant.deployments.encoder.planner import EncoderPart
from pliant.deployments.kinds import parse
from pliant.deployments.serving.kind import Planning
from pliant.deployments.serving.table import ReplicaTable
from pliant.formats.profile import Profile

pytestmark = pytest.mark.virtual_time


class Method:
    """Of a deployment's handle: replicas hang, but for those that `says` knows."""

    def __init__(self, says: dict[str, Profile]) -> None:
        self._says = says

    async def remote(self, assignment: Assignment) -> Profile:
        if assignment.replica not in self._says:
            await asyncio.Event().wait()
        return self._says[assignment.replica]


class Handle:
    def __init__(self, says: dict[str, Profile]) -> None:
        self.profile = Method(says)


async def test_a_replica_that_hangs_keeps_nobody_from_planning() -> None:
    topics = {"kind": "encoder", "model": "m", "replicas": 2, "lengths": "auto"}
    config = parse({"services": {"topics": topics}})
    table: ReplicaTable[Any, Report] = ReplicaTable(EncoderChooser(1.0))
    table.sync({"hangs": report(512), "well": report(512)})

    async def nothing(_name: str) -> None: ...

    async def as_they_are(replicas: Sequence[str]) -> Sequence[str]:
        return replicas

    handles = {"topics": Handle({"well": profile(0.5)})}
    planning = Planning(config, handles, {"topics": table}, lambda: None, nothing, 1, as_they_are)
    part = EncoderPart(planning)
    await asyncio.sleep(10)
    assert len(part.guidance()["topics"].plan["lengths"]) > 2
    part.check()
