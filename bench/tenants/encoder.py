"""A text classifier: a gateway's chooser and call path, and the engines of two replicas whose runtimes only sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import numpy as np

from pliant.bench.tenants.load import FOR_EVER_S, Asked, Found, Work
from pliant.config.tenants import OPEN
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.errand import TextErrand, TextWant
from pliant.deployments.encoder.messages import Answer, Query, Report
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.courier import Courier
from pliant.deployments.serving.outcome import Outcome, RequestError, Retry
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.tenants import Account, act_for

SLO_S = 0.5
"""The default of text classifiers."""
_REPLICAS = 2
_MODEST, _GREEDY = 48, 512
"""Tokens."""
_REPORTS_EVERY_S = 1.0


def _seconds(tokens: int) -> float:
    return 0.02 + 0.0003 * tokens


WORK = Work(_seconds(_MODEST), _seconds(_GREEDY), _REPLICAS)


class _Sleeper:
    max_length = _GREEDY
    dynamic = True
    backend = "asleep"

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        time.sleep(_seconds(len(ids)))
        return np.zeros(2, np.float32)


class _Sleepers:
    lengths = (_GREEDY,)
    profile = None
    device = "none"
    resident = False
    memory = None
    reason = "it only sleeps"

    def load(self, max_length: int) -> Runtime:
        return _Sleeper()


class _Replica:
    def __init__(self) -> None:
        self.engine = Engine(_Sleepers())
        self.desk: Desk[Query, Answer] = Desk("texts", self.engine.infer, self.engine.seconds)

    def report(self) -> Report:
        return {**self.engine.report(), "held": self.desk.held.amounts()}


class _Transport:
    def __init__(self, replicas: Mapping[str, _Replica]) -> None:
        self._replicas = replicas

    async def one(self, parcel: Parcel[Query]) -> Answer | Refusal:
        return await self._replicas[parcel.replica].desk.one(parcel)

    async def several(self, parcel: Parcel[Query]) -> AsyncGenerator[list[tuple[int, Answer | Refusal]], None]:
        async for part in self._replicas[parcel.replica].desk.several(parcel):
            yield part


class _Nowhere:
    """A `Recorder`."""

    def ended(self, outcome: Outcome) -> None: ...

    def retried(self, why: Retry) -> None: ...


def serve(work: Sequence[Asked]) -> Found:
    """What became of it."""
    return asyncio.run(served(work))


async def served(work: Sequence[Asked]) -> Found:
    """The same, in the running event loop."""
    replicas = {f"replica {number}": _Replica() for number in range(_REPLICAS)}
    for replica in replicas.values():
        await replica.engine.hold(_GREEDY)
    table: ReplicaTable[TextWant, Report] = ReplicaTable(EncoderChooser(SLO_S))
    courier: Courier[Query, Answer] = Courier(table.gateway, _Transport(replicas))
    caller: Caller[TextWant, Query, Answer] = Caller(table, _Nowhere(), courier)
    table.sync({name: replica.report() for name, replica in replicas.items()})

    async def reports() -> None:
        while True:
            await asyncio.sleep(_REPORTS_EVERY_S)
            table.sync({name: replica.report() for name, replica in replicas.items()})

    found = Found()

    async def ask(asked: Asked) -> None:
        act_for(Account(asked.tenant.name, OPEN))
        tokens, slo_s = (_MODEST, SLO_S) if asked.modest else (_GREEDY, FOR_EVER_S)
        ids = np.ones(tokens, "<i4").tobytes()
        began = time.monotonic()
        errand = TextErrand("texts", ids, tokens, began, slo_s, 1.0, None, max(30.0, slo_s), True)
        found.asked += asked.modest
        try:
            await caller.answer(errand)
        except RequestError:
            return
        found.answered(asked.modest, time.monotonic() - began, SLO_S)

    reporting = asyncio.create_task(reports())
    started = time.monotonic()
    clients = []
    for asked in work:
        if (wait_s := started + asked.at_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        clients.append(asyncio.create_task(ask(asked)))
    await asyncio.sleep(2 * SLO_S)
    for task in (reporting, *clients):
        task.cancel()
    await asyncio.wait([reporting, *clients])
    return found
