"""Replicas of any kind that follow a script, and what a gateway needs to ask them: without Ray, and without a model.

`ScriptedReplicas` is the transport and the streams of a `Caller`. A script says what a replica does with its first
query, with its second, and so on; the last act is repeated. Beside that, replicas can be killed, stopped and resumed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.call_path import CallPath, Recorder

from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal, Report
from pliant.deployments.serving.table import Choice, NoReplicaError

ANSWER_S = 0.02


@dataclass(frozen=True)
class Act:
    """What a replica does with one query. Without anything else it answers."""

    after_s: float = ANSWER_S
    """Until its answer, its first piece, or what else it does."""
    every_s: float = ANSWER_S
    """Between two pieces."""
    refusal: Refusal | None = None
    error: Exception | None = None
    """What reaches the gateway instead of an answer."""
    dies: bool = False
    """It answers neither this nor anything else any more."""
    stops: bool = False
    """Its process hangs from now on."""
    pieces: int | None = 0
    """Of a stream, before what else it does; None for all, and then it ends as an answer ends."""
    alive_s: float | None = None
    """How often it says that it is alive while it works towards a piece."""


ANSWERS = Act(pieces=None)


def slow(after_s: float) -> Act:
    return dataclasses.replace(ANSWERS, after_s=after_s)


def refuses(cause: Any, reason: str = "so it is", **others: Any) -> Act:
    return Act(0.001, refusal=Refusal(cause, reason, **others))


class _Process:
    def __init__(self, script: Sequence[Act]) -> None:
        self.script = list(script)
        self.dead = False
        self.death = asyncio.Event()
        self.runs = asyncio.Event()
        self.runs.set()

    def next(self) -> Act:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


class ScriptedReplicas:
    """Carries parcels to replicas that follow `scripts`. `reply` makes answers, and `pieces` what is left of one."""

    def __init__(
        self,
        scripts: Mapping[str, Sequence[Act]],
        reply: Callable[[Any], Any] = lambda query: query,
        pieces: Callable[[Any], Sequence[Any]] = lambda query: query,
        on_death: Callable[[str], None] = lambda _replica: None,
    ) -> None:
        self._processes = {name: _Process(script) for name, script in scripts.items()}
        self._reply = reply
        self._pieces = pieces
        self._on_death = on_death
        self.parcels: list[Parcel[Any]] = []
        """All that were sent, in order."""
        self.working: Counter[str] = Counter()
        """Queries that each replica has not ended."""
        self.ended: Counter[str] = Counter()
        """Queries that each replica ended, well or not, those that were cancelled included."""
        self.cancelled: Counter[str] = Counter()
        self.probed: list[str] = []

    @property
    def asked(self) -> list[str]:
        """The replicas to which queries were sent, in order."""
        return [parcel.replica for parcel in self.parcels for _ in parcel.queries]

    def kill(self, name: str) -> None:
        """What it works on is lost. Whoever asks it later finds that it has left."""
        process = self._processes[name]
        if not process.dead:
            process.dead = True
            process.death.set()
            self._on_death(name)

    def stop(self, name: str) -> None:
        """It neither works nor answers until it is resumed."""
        self._processes[name].runs.clear()

    def resume(self, name: str) -> None:
        self._processes[name].runs.set()

    async def probe(self, name: str) -> None:
        """As `probing.Probe`."""
        self.probed.append(name)
        await _unless_dead(self._processes[name], self._processes[name].runs.wait())

    async def one(self, parcel: Parcel[Any]) -> Any:
        """As `Transport.one`."""
        self.parcels.append(parcel)
        (query,) = parcel.queries
        return await self._answer(parcel.replica, query)

    async def several(self, parcel: Parcel[Any]) -> AsyncGenerator[Sequence[tuple[int, Any]], None]:
        """As `Transport.several`."""
        self.parcels.append(parcel)
        tasks = {
            asyncio.ensure_future(self._answer(parcel.replica, query)): index
            for index, query in enumerate(parcel.queries)
        }
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                broken = [task for task in done if task.exception()]
                part = [(tasks.pop(task), task.result()) for task in done if task not in broken]
                if part:
                    yield part
                for task in broken:
                    raise task.exception() or AssertionError
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def streams(self, parcel: Parcel[Any]) -> AsyncGenerator[Any, None]:
        """As `call.Streams`."""
        self.parcels.append(parcel)
        name, (query,) = parcel.replica, parcel.queries
        process, act = self._called(name)
        left = list(self._pieces(query))
        said = left if act.pieces is None else left[: act.pieces]
        with self._at_work(name):
            for index, piece in enumerate(said):
                async for sign in self._passes(process, act.every_s if index else act.after_s, act.alive_s):
                    yield sign
                yield piece
            if act.pieces is None:
                return
            async for sign in self._passes(process, act.every_s if said else act.after_s, act.alive_s):
                yield sign
            if refusal := await self._fails(name, process, act):
                yield refusal

    async def _answer(self, name: str, query: Any) -> Any:
        process, act = self._called(name)
        with self._at_work(name):
            async for _ in self._passes(process, act.after_s, None):
                pass
            return await self._fails(name, process, act) or self._reply(query)

    def _called(self, name: str) -> tuple[_Process, Act]:
        process = self._processes[name]
        if process.dead:
            raise ReplicaLeftError(f"{name} has left")
        act = process.next()
        if isinstance(act.error, (ReplicaLeftError, NotDeployedError)):
            raise act.error
        return process, act

    def _at_work(self, name: str) -> _AtWork:
        return _AtWork(self, name)

    async def _passes(self, process: _Process, seconds: float, alive_s: float | None) -> AsyncGenerator[Alive, None]:
        """The replica works for so long, with signs of life if it gives any."""
        left_s = seconds
        while left_s > 0:
            step_s = left_s if alive_s is None else min(left_s, alive_s)
            await _unless_dead(process, asyncio.sleep(step_s))
            await _unless_dead(process, process.runs.wait())
            left_s -= step_s
            if left_s > 0:
                yield Alive()

    async def _fails(self, name: str, process: _Process, act: Act) -> Refusal | None:
        if act.dies:
            self.kill(name)
        if act.stops:
            self.stop(name)
        await _unless_dead(process, process.runs.wait())
        if act.error:
            raise act.error
        return act.refusal


class _AtWork:
    """A query that a replica has."""

    def __init__(self, replicas: ScriptedReplicas, name: str) -> None:
        self._replicas = replicas
        self._name = name

    def __enter__(self) -> None:
        self._replicas.working[self._name] += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._replicas.working[self._name] -= 1
        self._replicas.ended[self._name] += 1
        if kind and issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
            self._replicas.cancelled[self._name] += 1


async def _unless_dead(process: _Process, waited_for: Any) -> None:
    """Wait for that; raises ReplicaLostError once the process is dead."""
    work, death = asyncio.ensure_future(waited_for), asyncio.ensure_future(process.death.wait())
    try:
        await asyncio.wait((work, death), return_when=asyncio.FIRST_COMPLETED)
        if process.dead:
            raise ReplicaLostError("it died")
    finally:
        work.cancel()
        death.cancel()


@dataclass
class CountingChooser:
    """Chooses the first that may be chosen of those that have been sent the least, in the order of `prefers`.

    It counts what was sent, and fails when something is counted off that was not sent.
    """

    prefers: Sequence[str] = ()
    predicted_s: float | None = ANSWER_S
    sheds: Exception | None = None
    """Raised instead of a choice."""
    shared: tuple[str, frozenset[str]] | None = None
    may: dict[str, float] = field(default_factory=dict)
    """What others hold of each that may be chosen."""
    open: Counter[tuple[str, Any]] = field(default_factory=Counter)
    """What was sent where and has not ended."""
    chosen: list[tuple[str, Any]] = field(default_factory=list)

    def update(self, replica: str, report: Report, others: float) -> None:
        self.may[replica] = others

    def suspend(self, replica: str) -> None:
        self.may.pop(replica, None)

    def remove(self, replica: str) -> None:
        self.may.pop(replica, None)

    def share(self, me: str, gateways: Collection[str]) -> None:
        self.shared = me, frozenset(gateways)

    def choose(self, want: Any, avoid: Collection[str]) -> Choice:
        if self.sheds:
            raise self.sheds
        able = [replica for replica in self.may if replica not in avoid]
        if not able:
            raise NoReplicaError
        ranks = {replica: rank for rank, replica in enumerate(self.prefers)}
        replica = min(able, key=lambda each: (ranks.get(each, len(ranks)), self.sent(each), each))
        self.open[replica, want] += 1
        self.chosen.append((replica, want))
        return Choice(replica, self.predicted_s, want)

    def done(self, choice: Choice) -> None:
        replica, want = choice.replica, choice.work
        assert self.open[replica, want] > 0, f"{want} was not sent to {replica}, or counted off before"
        self.open[replica, want] -= 1
        if not self.open[replica, want]:
            del self.open[replica, want]

    def sent(self, replica: str) -> float:
        return sum(count for (name, _), count in self.open.items() if name == replica)


def report(version: int = 1, **held: float) -> Report:
    return Report(version=version, held=held, served=0)


class Service(CallPath[Any, Any, Any, Report, Recorder]):
    """A gateway's whole call path to replicas that follow `scripts`, all known and running."""

    def __init__(self, scripts: Mapping[str, Sequence[Act]], chooser: CountingChooser | None = None) -> None:
        self.chooser = chooser or CountingChooser()
        self.replicas = ScriptedReplicas(scripts, on_death=lambda replica: self.table.lose(replica))
        super().__init__(self.chooser, self.replicas, Recorder(), self.replicas.streams)
        self.table.probe_with(self.replicas.probe)
        self.table.sync({name: report() for name in scripts})

    def check_nothing_left(self) -> None:
        """Whatever was sent is counted off, and no replica works for nobody."""
        assert not self.chooser.open
        assert not +self.replicas.working


@asynccontextmanager
async def nothing_left(service: Service) -> AsyncGenerator[Service, None]:
    """After what is done within: see `check_nothing_left`; no task is left, and no exception that nobody looked at."""
    complaints: list[Mapping[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    loop.set_exception_handler(lambda _loop, context: complaints.append(context))
    yield service
    service.table.sync({})  # nobody asks any more whether those that stopped run
    for _ in range(10):
        await asyncio.sleep(0)
    service.check_nothing_left()
    assert not asyncio.all_tasks() - before
    gc.collect()
    assert not complaints, complaints
