"""Replicas, gateways and planners die, stop, start twice and hear late, at random by a seed, and nothing is lost.

`PLIANT_SIMULATED_SEEDS=0:500` tries others than the few of every day.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.peft_folders import adapter_folder, model_folder
from support.simulated.cluster import LENGTHS, REPLICAS, SimulatedCluster, SimulatedGateway
from support.simulated.processes import SimulatedLoop, unless_dead

from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.errors import ReplicaLostError
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.state.record import Record

FIRST, LAST = map(int, os.environ.get("PLIANT_SIMULATED_SEEDS", "0:6").split(":"))
TROUBLE_S = 40.0
SETTLES_WITHIN_S = 80.0
TEXT_EVERY_S, CHANGERS = 0.2, 4
RANKS = (2, 4)
PENDING_S = 20.0
"""That a change may take whose client has left."""
Loaded = int | None
"""The rank of what is loaded; None: nothing is."""


class Campaign:
    """What happens, and what must not."""

    def __init__(self, folder: Path, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.rng = rng
        for rank in RANKS:
            adapter_folder(folder / "roots" / f"rank{rank}", rank)
        adapters = {"roots": [str(folder / "roots")]}
        model = model_folder(folder / "model")
        chat = {"kind": "llm", "model": model, "max_length": 64, "adapters": adapters}
        self.cluster = SimulatedCluster(folder, chat, rng, patch)
        self.may: dict[str, set[Loaded]] = {f"a{index}": {None} for index in range(CHANGERS)}
        """By adapter: what may be stored now; one thing, unless a change is under way or nobody knows its end."""
        self.changes = dict.fromkeys(self.may, 0)
        self.seen: dict[tuple[str, str], tuple[int, Loaded]] = {}
        """By gateway and adapter: after how many changes it knew what is so, and what that is."""
        self.settled = False
        self.ends: list[str] = []
        self.plans: dict[str, tuple[int, int]] = {}
        """By gateway: the epoch of the planner that it obeyed last, and the version of its plan."""

    async def run(self) -> None:
        cluster = self.cluster
        cluster.start_planner()
        for _ in range(2):
            cluster.start_gateway()
        for _ in range(REPLICAS):
            await cluster.start_replica()
        await asyncio.sleep(3)
        watching = asyncio.create_task(self.watch())
        try:
            asking = [
                asyncio.create_task(self.ask(number))
                for number in range(round((TROUBLE_S + SETTLES_WITHIN_S) / TEXT_EVERY_S))
            ]
            async with asyncio.timeout(10 * TROUBLE_S):
                await asyncio.gather(self.trouble(), *map(self.change, self.may))
                await self.settle()
                self.settled = True
                await asyncio.gather(*asking)
            for gateway in self.cluster.gateways:
                assert {facts["outstanding"] for facts in gateway.table.replicas().values()} <= {0}
        finally:
            watching.cancel()
            cluster.end()
        if watching.done() and not watching.cancelled():
            watching.result()

    async def trouble(self) -> None:
        """One thing after another breaks."""
        loop, cluster = asyncio.get_running_loop(), self.cluster
        ends = loop.time() + TROUBLE_S
        planners = self.kill_planner, self.stop_planner, self.second_planner
        kinds = (self.kill_replica, self.stop_replica, *planners, self.kill_gateway)
        pending = []
        while loop.time() < ends:
            await asyncio.sleep(self.rng.uniform(0.5, 4))
            kind = self.rng.choice((*kinds, self.break_storage, self.break_length, self.slow_network))
            pending.append(asyncio.create_task(kind()))
        await asyncio.gather(*pending)
        cluster.storage_fault, cluster.broken = "", set()

    async def kill_replica(self) -> None:
        if self.cluster.replicas:
            await self.cluster.kill_replica(self.rng.choice(list(self.cluster.replicas)))

    async def stop_replica(self) -> None:
        if self.cluster.replicas:
            process = self.cluster.replicas[self.rng.choice(list(self.cluster.replicas))].process
            process.runs.clear()
            await asyncio.sleep(self.rng.uniform(0.5, 10))
            process.runs.set()

    async def kill_planner(self) -> None:
        for planner in self.cluster.planners:
            planner.process.kill()

    async def stop_planner(self) -> None:
        """Serve starts another one after a while, knows the old one no longer, and kills that later."""
        old = list(self.cluster.planners)
        for planner in old:
            planner.process.runs.clear()
        await asyncio.sleep(self.rng.uniform(4, 9))
        self.cluster.start_planner()
        self.cluster.planners = [each for each in self.cluster.planners if each not in old]
        if self.rng.random() < 0.5:
            for planner in old:
                planner.process.runs.set()
        await asyncio.sleep(self.rng.uniform(0.5, 6))
        for planner in old:
            planner.process.kill()

    async def second_planner(self) -> None:
        """As in a rolling upgrade: the new one is there before the old one ends."""
        old = list(self.cluster.planners)
        self.cluster.start_planner()
        await asyncio.sleep(self.rng.uniform(0.5, 6))
        for planner in old:
            planner.process.kill()

    async def kill_gateway(self) -> None:
        gateway = await self.gateway()
        gateway.process.kill()
        self.cluster.gateways.remove(gateway)
        await asyncio.sleep(self.rng.uniform(0, 1))
        self.cluster.start_gateway()

    async def break_storage(self) -> None:
        self.cluster.storage_fault = self.rng.choice(("before", "after", "torn"))
        await asyncio.sleep(self.rng.uniform(0.5, 5))
        self.cluster.storage_fault = ""

    async def break_length(self) -> None:
        length = self.rng.choice(LENGTHS)
        self.cluster.broken.add(length)
        await asyncio.sleep(self.rng.uniform(0.5, 10))
        self.cluster.broken.discard(length)

    async def slow_network(self) -> None:
        self.cluster.network.latest_s = 0.3
        await asyncio.sleep(self.rng.uniform(0.5, 5))
        self.cluster.network.latest_s = 0.02

    async def gateway(self) -> SimulatedGateway:
        """One that lives, once there is one."""
        while True:
            if self.cluster.gateways:
                return self.rng.choice(self.cluster.gateways)
            await asyncio.sleep(0.1)

    async def ask(self, number: int) -> None:
        """A client sends texts, and again to another gateway if its own died."""
        await asyncio.sleep(number * TEXT_EVERY_S)
        if self.settled:
            return
        texts = [(number * 7 + index) % 999 + 1 for index in range(self.rng.choice((1, 1, 3)))]
        lengths = [self.rng.randint(1, LENGTHS[-1]) for _ in texts]
        body = [" ".join([f"w{word}"] * length) for word, length in zip(texts, lengths, strict=True)]
        parameters = ClassifyParameters(function_to_apply="none", slo_ms=20_000)
        while True:
            gateway = await self.gateway()
            before = len(gateway.recorder.ends)
            try:
                found = await unless_dead(
                    gateway.process, gateway.process.spawn(gateway.classifier.classify(body, parameters))
                )
            except ReplicaLostError:
                continue
            except RequestError as error:
                self.ends.append(f"{error.outcome}: {error.reason}")
                return
            assert len(gateway.recorder.ends) - before >= len(texts)
            for prediction, word, length in zip(found, texts, lengths, strict=True):
                scores = dict(zip(prediction.labels, prediction.scores, strict=True))
                assert scores == {"length": length, "first": word}
            self.ends.append(Outcome.OK)
            return

    async def change(self, name: str) -> None:
        """A client loads, replaces and unloads the adapter `name`, one after another."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + TROUBLE_S
        pending: list[tuple[float, Loaded]] = []
        """What changes may yet come about, of which nobody heard the end, and until when."""
        while loop.time() < ends:
            await asyncio.sleep(self.rng.random() * 3)
            rank: Loaded = self.rng.choice((None, *RANKS))
            gateway = await self.gateway()
            before = set(self.may[name])
            self.changes[name] += 1
            self.may[name] |= {rank}
            call = (
                gateway.adapters.unload(name)
                if rank is None
                else gateway.adapters.load(name, f"rank{rank}", None, True)
            )
            try:
                await unless_dead(gateway.process, gateway.process.spawn(call))
            except ReplicaLostError:
                pending.append((loop.time() + PENDING_S, rank))
            except RequestError as error:
                if error.outcome is not Outcome.REJECTED and "nothing was changed" not in error.reason:
                    pending.append((loop.time() + PENDING_S, rank))
                    continue
                self.may[name] = before
                if error.outcome is Outcome.REJECTED and (
                    "there is no adapter" not in error.reason or None not in before
                ):
                    raise AssertionError(f"{name} may be {before}: {error.reason}") from None
            else:
                self.may[name] = {rank, *(other for ends_at, other in pending if ends_at > loop.time())}
            self.check_stored()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.check_stored()
            self.check_gateways()

    def stored(self) -> dict[str, Loaded]:
        content = json.loads(Record(self.cluster.storage, "registries/chat").look() or "{}")
        return {name: entry["ranks"][0] for name, entry in content.get("loaded", {}).items()}

    def check_stored(self) -> None:
        """What was acknowledged is durable."""
        stored = self.stored()
        for name, may in self.may.items():
            assert stored.get(name) in may, f"{name} is stored as {stored.get(name)}, and may be {may}"

    def check_gateways(self) -> None:
        """No gateway goes back to what is no longer so, nor to an earlier plan."""
        for gateway in self.cluster.gateways:
            obeyed = gateway.follower.of("topics")
            if obeyed.epoch:  # it reached a planner
                plan = obeyed.epoch, obeyed.plan.get("version", 0)
                before = self.plans.get(gateway.process.name, (0, 0))
                assert plan >= before, f"{gateway.process.name} obeyed {before}, now {plan}"
                self.plans[gateway.process.name] = plan
            for name, may in self.may.items():
                key, changes = (gateway.process.name, name), self.changes[name]
                known = gateway.adapters.known.get(name)
                rank = known.adapter.rank if known else None
                if len(may) == 1:
                    at, knew = self.seen.get(key, (-1, None))
                    assert at != changes or rank == knew, f"{key} knew {knew}, and now {rank}"
                    if may == {rank} and gateway.adapters.informed:
                        self.seen[key] = changes, rank

    async def settle(self) -> None:
        """Once nothing breaks any more all is well again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLES_WITHIN_S
        while wrong := list(self.unsettled()):
            assert loop.time() < until, wrong
            await asyncio.sleep(1)

    def unsettled(self) -> Iterable[Any]:
        cluster = self.cluster
        held = sorted(replica.engine.report()["max_length"] for replica in cluster.replicas.values())
        if len(held) != REPLICAS or 0 in held:
            yield "replicas hold", held
        stored = self.stored()
        for gateway in cluster.gateways:
            plan = gateway.follower.of("topics").plan.get("replicas", {})
            planned = sorted(int(length) for length, count in plan.items() for _ in range(count))
            if planned != held:
                yield gateway.process.name, "plan", planned, "held", held
            usable = [name for name in cluster.replicas if gateway.table.usable(name)]
            if len(usable) != REPLICAS:
                yield gateway.process.name, "may choose only", usable
            known = {name: entry.adapter.rank for name, entry in gateway.adapters.known.items()}
            if known != stored:
                yield gateway.process.name, "knows", known, "stored", stored


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_nothing_is_lost(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)

    async def run() -> list[str]:
        campaign = Campaign(tmp_path, rng, monkeypatch)
        await campaign.run()
        return campaign.ends

    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(rng)) as runner:
        ends = runner.run(run())
    assert len(ends) > TROUBLE_S / TEXT_EVERY_S
    assert set(ends) == {Outcome.OK}
