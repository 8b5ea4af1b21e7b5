"""The encoders' part of the planner: a runtime scheduler for each service, once replicas report their lengths."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.lengths import Lengths
from pliant.deployments.encoder.messages import Assignment, Report
from pliant.deployments.encoder.runtime_scheduler import RuntimeScheduler
from pliant.deployments.serving.kind import Part, Planning
from pliant.deployments.serving.messages import Guidance, News
from pliant.deployments.serving.table import ReplicaTable
from pliant.formats.profile import Profile

logger = logging.getLogger("pliant")

_STEP_S = 0.2
_RETRY_S = 1.0
_CALL_WITHIN_S = 5.0


class EncoderPart(Part):
    """Of all classifiers."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._schedulers: dict[str, RuntimeScheduler] = {}
        self._tasks = [
            asyncio.create_task(self._conduct(name, service))
            for name, service in planning.config.of(EncoderConfig).items()
        ]

    def hear(self, service: str, news: News) -> None:
        if scheduler := self._schedulers.get(service):
            scheduler.hear(news)

    def guidance(self) -> Mapping[str, Guidance]:
        return {name: scheduler.guidance() for name, scheduler in self._schedulers.items()}

    def wanted(self) -> Mapping[str, int]:
        wanted = {name: scheduler.wanted() for name, scheduler in self._schedulers.items()}
        return {name: replicas for name, replicas in wanted.items() if replicas is not None}

    def ready_for(self, service: str, wanted: int) -> int:
        scheduler = self._schedulers.get(service)
        return scheduler.ready_for(wanted) if scheduler else wanted

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"a scheduler has ended: {task}")
        for scheduler in self._schedulers.values():
            if scheduler.outdated:
                raise scheduler.outdated

    async def _conduct(self, name: str, config: EncoderConfig) -> None:
        handle, table = self._planning.handles[name], self._planning.tables[name]
        scheduler, resident = None, None
        while True:
            try:
                if scheduler is None or _resident(table) not in (None, resident):
                    resident = _resident(table)
                    if lengths := await _lengths(name, config, table, handle):
                        calls, planning = _Calls(handle, self._planning.epoch), self._planning
                        scheduler = RuntimeScheduler(
                            name, config, lengths, table, calls, planning.first_to_stop, planning.changed
                        )
                        self._schedulers[name] = scheduler
                else:
                    await scheduler.step()
                await asyncio.sleep(_STEP_S if scheduler else _RETRY_S)
            except Exception:
                logger.exception("%s: planning failed; trying again", name)
                await asyncio.sleep(_RETRY_S)


async def _lengths(
    service: str, config: EncoderConfig, table: ReplicaTable[Any, Report], handle: Any
) -> Lengths | None:
    """Where the service's replicas may be at home; for `lengths: auto` it follows from what most of them have profiled,
    unless they take all lengths.

    None while no replica can say.
    """
    resident = bool(_resident(table))
    if config.lengths or resident:
        longest = max((report["max_length"] for report in table.reports().values()), default=0)
        return Lengths(config.lengths, None, resident=resident, longest=longest)
    answers = await asyncio.gather(*(_profile(replica, handle) for replica in table.reports()), return_exceptions=True)
    profiles = sorted((answer for answer in answers if isinstance(answer, Profile)), key=lambda profile: profile.device)
    if not profiles:
        return None
    devices = Counter(profile.device for profile in profiles)
    device = devices.most_common(1)[0][0]
    if len(devices) > 1:
        logger.warning("%s: replicas run on %s; lengths are chosen for %s", service, ", ".join(devices), device)
    return Lengths(None, next(profile for profile in profiles if profile.device == device))


def _resident(table: ReplicaTable[Any, Report]) -> bool | None:
    """Whether replicas take all lengths, all of them; None while none says so."""
    reports = table.reports().values()
    return all(report.get("resident", False) for report in reports) if reports else None


async def _profile(replica: str, handle: Any) -> Profile | None:
    async with asyncio.timeout(_CALL_WITHIN_S):
        profile: Profile | None = await handle.profile.remote(Assignment(replica, 0))
        return profile


class _Calls:
    """Calls to the replica that an assignment names."""

    def __init__(self, handle: Any, epoch: int) -> None:
        self._handle = handle
        self._epoch = epoch

    async def hold(self, assignment: Assignment) -> Report:
        report: Report = await self._handle.hold.remote(assignment._replace(epoch=self._epoch))
        return report
