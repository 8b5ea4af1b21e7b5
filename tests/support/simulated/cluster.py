"""A cluster in virtual time: planners, gateways and text classifiers' replicas as they are, and a controller that plays
Ray Serve's part. All that lies between them is by a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.call_path import CallPath
from support.doubles import Sleepers
from support.rooms import roomy
from support.simulated.processes import Network, Process
from support.stored_files import Fault, FaultyStorage, MemoryStorage
from support.text_service import TextRecorder
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.engine import Engine, LoadError
from pliant.deployments.encoder.errand import TextWant
from pliant.deployments.encoder.messages import Answer, Assignment, Query, Report
from pliant.deployments.kinds import loaded, parse
from pliant.deployments.llm import adapter_registry
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.serving import planner as planning
from pliant.deployments.serving.errors import ReplicaLeftError
from pliant.deployments.serving.follower import Follower, Tally
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.planner import Planner
from pliant.deployments.serving.replica import Desk, Obedience
from pliant.deployments.serving.table import ReplicaTable
from pliant.models.encoder_info import EncoderInfo

LENGTHS = (4, 8, 16)
REPLICAS = 4


class SimulatedReplica:
    """Of the classifier, with an engine whose runtimes only sleep."""

    def __init__(self, process: Process, sleepers: Sleepers) -> None:
        self.process = process
        self.sleepers = sleepers
        self.engine = process.run(lambda: Engine(sleepers))
        self.desk: Desk[Query, Answer] = Desk("topics", self.engine.infer, self.engine.seconds)
        self.obedience = Obedience()

    async def start(self) -> None:
        """Hold the longest that can be loaded. Raises LoadError."""
        for length in reversed(LENGTHS):
            try:
                await self.engine.hold(length)
            except LoadError:
                continue
            return
        raise LoadError("no runtime could be loaded")

    def report(self) -> Report:
        return {**self.engine.report(), "held": self.desk.held.amounts()}

    async def hold(self, assignment: Assignment) -> Report:
        self.obedience.check(assignment.epoch)
        await self.engine.hold(assignment.max_length)
        return self.report()


class SimulatedPlanner:
    """The planner of `cluster`, whose storage fails as that says."""

    def __init__(self, cluster: SimulatedCluster, process: Process) -> None:
        self.process = process
        handles = {name: SimpleNamespace(hold=_Remote(cluster, process)) for name in cluster.config.services}
        self.planner = process.run(lambda: Planner(cluster.config, loaded(), handles, roomy))  # type: ignore[arg-type]


class TalliedRecorder(TextRecorder):
    """Of which the planner hears, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def arrived(self, tokens: int) -> None:
        self.tally.arrived(tokens)

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None:
        self.tally.answered(seconds / slo_s)

    def shed(self) -> None:
        self.tally.shed()


class SimulatedGateway(CallPath[TextWant, Query, Answer, Report, TalliedRecorder]):
    """What a gateway has for its services, and what it follows."""

    def __init__(self, cluster: SimulatedCluster, process: Process, folder: Path) -> None:
        self.process = process
        chooser = EncoderChooser(1.0)
        super().__init__(chooser, _Transport(cluster, process), TalliedRecorder())
        config = cluster.config.services["topics"]
        assert isinstance(config, EncoderConfig)
        info = EncoderInfo("classify", ("length", "first"), 16, pairs=False, scores="softmax", vocabulary=6)
        self.classifier = Classifier("topics", config, folder, info, chooser, self.table, self.caller, self.recorder)
        call = partial(cluster.call_planner, process)

        async def exchange(*what: Any) -> Any:
            return await call(lambda planner: planner.exchange(*what), twice=True)

        def ask(method: str, *what: Any) -> Any:
            asked = call(lambda planner: planner.ask("llm", method, *what), twice=method == "news")
            return self.follower.while_it_lasts(asked)

        self.follower = Follower(process.name, exchange, {"topics": self.table}, {"topics": self.recorder.tally})
        self.adapters = AdapterFollower(ask)
        process.spawn(self.follower.run())
        process.spawn(self.adapters.run())


class SimulatedCluster:
    """`folder` receives what is read from files; state lies in `storage`."""

    def __init__(
        self,
        folder: Path,
        chat: Mapping[str, Any],
        rng: random.Random,
        patch: pytest.MonkeyPatch,
        least: int = REPLICAS,
    ) -> None:
        """Of REPLICAS of the classifier, or fewer, down to `least`, as the planner wants."""
        self.rng = rng
        self.network = Network(rng)
        self.storage = MemoryStorage()
        self.storage_fault: Fault = ""
        """That some of the steps of planners' storages have."""
        self.broken: set[int] = set()
        """Lengths that cannot be loaded now."""
        count = {"min": least, "max": REPLICAS}
        topics = {"kind": "encoder", "model": "m", "lengths": LENGTHS, "replicas": count, "period_s": 10}
        self.config = parse({"services": {"topics": topics, "chat": chat}, "state": str(folder)})
        self.replicas: dict[str, SimulatedReplica] = {}
        """Oldest first."""
        self.per_token_s = 0.0
        """That runtimes take for each token of their length, beside a millisecond."""
        self.target = REPLICAS
        self.stopped: list[SimulatedReplica] = []
        """As there were to be fewer."""
        self.on_stop: Callable[[], object] = lambda: None
        self.planners: list[SimulatedPlanner] = []
        self.gateways: list[SimulatedGateway] = []
        self._folder = _tokenizer(folder)
        self._started = 0
        self._tables: list[tuple[Process, ReplicaTable[Any, Any]]] = []
        self._spread_at: dict[ReplicaTable[Any, Any], float] = {}
        patch.setattr(adapter_registry, "storage", lambda _place: self._storage())
        patch.setattr(planning, "table_of", lambda name, chooser, _handle: self._table(name, chooser))
        patch.setattr(planning, "foreseen", self._newest_first)
        self._controller = asyncio.create_task(self._control())

    async def call_planner(self, source: Process, call: Any, twice: bool) -> Any:
        """What `call` of some planner that Serve knows comes to, once there is one."""
        while True:
            if living := [each for each in self.planners if not each.process.dead]:
                break
            await asyncio.sleep(0.1)
        found = self.rng.choice(living)
        return await self.network.call(source, found.process, lambda: call(found.planner), twice)

    def start_planner(self) -> None:
        """One more."""
        self.planners.append(SimulatedPlanner(self, self._process("planner")))

    def start_gateway(self) -> SimulatedGateway:
        """One more."""
        process = self._process("gateway")
        gateway = process.run(lambda: SimulatedGateway(self, process, self._folder))
        self._tables.append((process, gateway.table))
        self.gateways.append(gateway)
        return gateway

    async def start_replica(self) -> None:
        """One more, which takes a while to hold something."""
        process = self._process("replica")
        replica = SimulatedReplica(process, Sleepers(LENGTHS, service_s=0.001, per_token_s=self.per_token_s))
        replica.sleepers.broken = self.broken
        try:
            await process.spawn(replica.start())
        except LoadError:
            process.kill()
        else:
            self.replicas[process.name] = replica

    async def kill_replica(self, name: str) -> None:
        """Gateways and planners hear of it one after another, and a new one is started."""
        self.replicas.pop(name).process.kill()
        for _, table in self.rng.sample(self._tables, len(self._tables)):
            await asyncio.sleep(self.rng.random() * 0.3)
            table.lose(name)

    def replica(self, name: str) -> SimulatedReplica | None:
        """One that runs, or is being stopped."""
        return next((each for each in (*self.replicas.values(), *self.stopped) if each.process.name == name), None)

    def end(self) -> None:
        """Kill all that lives."""
        self._controller.cancel()
        for each in (*self.replicas.values(), *self.stopped, *self.planners, *self.gateways):
            each.process.kill()

    def _process(self, what: str) -> Process:
        self._started += 1
        return Process(f"{what} {self._started}")

    def _table(self, name: str, chooser: Any) -> ReplicaTable[Any, Any]:
        table: ReplicaTable[Any, Any] = ReplicaTable(chooser)
        process = Process.current()
        assert process
        if name == "topics":
            self._tables.append((process, table))
        return table

    def _storage(self) -> FaultyStorage:
        process = Process.current()
        assert process

        def fault() -> Fault:
            if process.dead:
                return "before"
            return self.storage_fault if self.rng.random() < 0.3 else ""

        return FaultyStorage(self.storage, fault)

    async def _control(self) -> None:
        """Serve's controller: replaces what died, or says that it had better; spreads what replicas report, late."""
        missing_since: float | None = None
        while True:
            await asyncio.sleep(self.rng.uniform(0.2, 0.6))
            self._tables = [(process, table) for process, table in self._tables if not process.dead]
            reports = {name: replica.report() for name, replica in self.replicas.items()}
            for process, table in self._tables:
                self._spread(process, table, reports)
            for name, replica in list(self.replicas.items()):
                if replica.engine.failure:
                    await self.kill_replica(name)
            for planner in self.planners:
                if not planner.process.dead:
                    self._check(planner)
            if all(planner.process.dead for planner in self.planners) and self.rng.random() < 0.2:
                self.start_planner()
            await self._scale()
            if len(self.replicas) >= self.target:
                missing_since = None
            elif missing_since is None:
                missing_since = asyncio.get_running_loop().time() + self.rng.uniform(1, 4)
            elif asyncio.get_running_loop().time() > missing_since:
                missing_since = None
                await self.start_replica()

    async def _scale(self) -> None:
        """What is stopped gets nothing new once that has got about, and answers what it has."""
        for each in self.planners:
            if not each.process.dead and len(self.replicas) >= self.target:
                wanted = await each.planner.record_autoscaling_stats()
                self.target = wanted.get("topics", self.target)
        while len(self.replicas) > self.target:
            newest, *_ = await self._newest_first(list(self.replicas))
            self.stopped.append(self.replicas.pop(newest))
            self.on_stop()

    async def _newest_first(self, oldest_first: Sequence[str]) -> Sequence[str]:
        return oldest_first[::-1]

    def _check(self, planner: SimulatedPlanner) -> None:
        try:
            planner.planner.check_health()
        except Exception:
            planner.process.kill()

    def _spread(self, process: Process, table: ReplicaTable[Any, Any], reports: Mapping[str, Report]) -> None:
        """Have `table` hear of it late, but after what was earlier."""
        loop = asyncio.get_running_loop()
        at = self._spread_at[table] = max(self._spread_at.get(table, 0) + 1e-6, loop.time() + self.rng.random())
        loop.call_at(at, lambda: None if process.dead else table.sync(reports))


class _Remote:
    """A method of a handle: calls the replica that its argument names."""

    def __init__(self, cluster: SimulatedCluster, source: Process) -> None:
        self._cluster = cluster
        self._source = source

    def remote(self, assignment: Assignment) -> Any:
        replica = self._cluster.replica(assignment.replica)
        return self._hold(replica, assignment)

    async def _hold(self, replica: SimulatedReplica | None, assignment: Assignment) -> Report:
        if replica is None:
            raise ReplicaLeftError(assignment.replica)
        return await self._cluster.network.call(
            self._source, replica.process, lambda: replica.hold(assignment), twice=False
        )


class _Transport:
    """Carries parcels to replicas."""

    def __init__(self, cluster: SimulatedCluster, source: Process) -> None:
        self._cluster = cluster
        self._source = source

    async def one(self, parcel: Parcel[Query]) -> Answer | Refusal:
        if (replica := self._cluster.replica(parcel.replica)) is None:
            raise ReplicaLeftError(parcel.replica)
        return await self._cluster.network.call(
            self._source, replica.process, lambda: replica.desk.one(parcel), twice=True
        )

    async def several(self, parcel: Parcel[Query]) -> AsyncGenerator[list[tuple[int, Answer | Refusal]], None]:
        tasks = {
            asyncio.ensure_future(self.one(parcel._replace(queries=(query,)))): index
            for index, query in enumerate(parcel.queries)
        }
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                failed = next((error for task in done if (error := task.exception())), None)
                yield [(tasks.pop(task), task.result()) for task in done if not task.exception()]
                if failed:
                    raise failed
        finally:
            for task in tasks:
                task.cancel()


def _tokenizer(folder: Path) -> Path:
    """A token for each of w1 to w999."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{index}": index for index in range(1, 1000)}}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
