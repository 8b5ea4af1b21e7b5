"""A vision transformer: the engine with the policy that is shipped, on a device that only sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import numpy as np

from pliant.bench.tenants.load import FOR_EVER_S, Asked, Found, Work
from pliant.deployments.vision.engine import Engine
from pliant.deployments.vision.messages import Answer, Query
from pliant.deployments.vision.queue import Waiting
from pliant.deployments.vision.tasks import Tasks
from pliant.formats.vision_task import TaskRef
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import ExactPolicy
from pliant.policies.vision.token_profile import TokenProfile

SLO_S = 0.6
"""That of the default cluster's tasks."""
_ACCURACY = {-4: 0.85, 0: 0.93, 4: 0.96}
_ROWS, _QUEUE = 64, 256
"""The defaults of vision services."""
_GREEDY_UTILITY = 1e6
_TASK = TaskRef("task", "/task", "1", 2, tuple(gamma for gamma in _ACCURACY if gamma > 0))


def _seconds(gamma: int, rows: int) -> float:
    return (0.01 + 0.006 * rows) * (1 + gamma / 16)


WORK = Work(_seconds(0, _ROWS) / _ROWS, _seconds(0, _ROWS) / _ROWS, 1.0)


class _Device:
    backend = "asleep"

    async def ready(self) -> None: ...

    async def run(self, images: Sequence[bytes], tasks: Sequence[str], gamma: int) -> Sequence[np.ndarray]:
        await asyncio.sleep(_seconds(gamma, len(images)))
        return [np.zeros(2, np.float32)] * len(images)


class _Loader:
    async def load(self, task: TaskRef) -> Mapping[int, float]:
        return _ACCURACY

    async def unload(self, task: TaskRef) -> None: ...


def serve(work: Sequence[Asked]) -> Found:
    """What became of it."""
    return asyncio.run(served(work))


async def served(work: Sequence[Asked]) -> Found:
    """The same, in the running event loop."""
    tasks = Tasks(_Loader())
    profile = TokenProfile(_ACCURACY, _seconds, tasks.accuracy, _ROWS)
    policy: ExactPolicy[Waiting] = ExactPolicy(profile, TimePrice(profile))
    engine = Engine(_Device(), tasks, profile, policy, _QUEUE)
    found = Found()

    async def ask(asked: Asked) -> None:
        budget_s, utility = (SLO_S, 1.0) if asked.modest else (FOR_EVER_S, _GREEDY_UTILITY)
        began = time.monotonic()
        found.asked += asked.modest
        reply = await engine.classify(Query(b"", _TASK, budget_s, utility, asked.tenant))
        if isinstance(reply, Answer):
            found.answered(asked.modest, time.monotonic() - began, SLO_S)

    started = time.monotonic()
    clients = []
    for asked in work:
        if (wait_s := started + asked.at_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        clients.append(asyncio.create_task(ask(asked)))
    await asyncio.sleep(2 * SLO_S)
    for task in clients:
        task.cancel()
    await asyncio.wait(clients)
    await engine.close()
    return found
