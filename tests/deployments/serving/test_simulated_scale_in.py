"""Fewer replicas are wanted, Serve stops the newest, and no text waits for what it held."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.peft_folders import adapter_folder, model_folder
from support.simulated.cluster import LENGTHS, REPLICAS, SimulatedCluster
from support.simulated.processes import SimulatedLoop

from pliant.deployments.http.parameters import ClassifyParameters

TEXT_EVERY_S = 0.1
LONG = 10
"""One text in so many is of the longest."""
LEAST = 2
WITHIN_S = 400.0
"""Replicas go one by one, each after a minute in which all was quiet."""


async def scaled_in(cluster: SimulatedCluster) -> list[float]:
    """The seconds that texts of the longest took, until few replicas are left, and for a while on."""
    loop = asyncio.get_running_loop()
    cluster.per_token_s = 0.002
    for _ in range(REPLICAS):
        await cluster.start_replica()
    cluster.start_planner()
    gateway = cluster.start_gateway()
    await asyncio.sleep(3)
    parameters = ClassifyParameters(function_to_apply="none", slo_ms=20_000)
    took: list[float] = []

    async def ask(number: int) -> None:
        sent, long = loop.time(), number % LONG == 0
        text = " ".join(["w1"] * (LENGTHS[-1] if long else 2))
        await gateway.process.spawn(gateway.classifier.classify([text], parameters))
        if long:
            took.append(loop.time() - sent)

    asking, until, left = [], loop.time() + WITHIN_S, 100
    while left and loop.time() < until:
        asking.append(asyncio.create_task(ask(len(asking))))
        await asyncio.sleep(TEXT_EVERY_S)
        left -= len(cluster.replicas) == LEAST
    await asyncio.gather(*asking)
    cluster.end()
    return took


@pytest.mark.parametrize("seed", range(3))
def test_what_is_stopped_is_needed_least(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    adapter_folder(tmp_path / "roots" / "rank2", 2)
    adapters = {"roots": [str(tmp_path / "roots")]}
    chat = {"kind": "llm", "model": model_folder(tmp_path / "model"), "max_length": 64, "adapters": adapters}
    left: list[list[int]] = []
    """What the others held when one was stopped."""

    async def run() -> list[float]:
        cluster = SimulatedCluster(tmp_path, chat, rng, monkeypatch, LEAST)
        cluster.on_stop = lambda: left.append(sorted(each.engine.home for each in cluster.replicas.values()))
        return await scaled_in(cluster)

    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(rng)) as runner:
        took = runner.run(run())
    assert left == [[4, 4, 16], [4, 16]]
    assert max(took) < 2.5, "calls may take half of a second, and one may be repeated"
