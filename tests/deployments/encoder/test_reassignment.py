"""Replicas change lengths while two gateways believe different, outdated plans: every request is answered once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from pliant.deployments.encoder.routing_table import RoutingTable
from support.doubles import Sleepers
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.engine import Answer, Engine, Query, Refusal
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.outcome import Outcome
from pliant.models.sources import ModelInfo

pytestmark = pytest.mark.virtual_time
LENGTHS = (4, 8, 16)
REQUESTS = 400


class Quiet:
    """Records nothing."""

    def arrived(self, tokens: int) -> None: ...
    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None: ...
    def shed(self) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...
    def retried(self, why: str) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{index}": index for index in range(1, 1000)}}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def caller(table: RoutingTable, engines: dict[str, Engine]) -> Callable[[Query], Awaitable[Answer | Refusal]]:
    """What the router does."""

    async def call(query: Query) -> Answer | Refusal:
        replica = table.choose(query.length, query.budget_s, query.utility)
        try:
            await asyncio.sleep(random.random() * 0.002)
            return await engines[replica].infer(query)
        finally:
            table.done(replica)

    return call


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_fails_whatever_the_gateways_believe(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    engines = {name: Engine(name, Sleepers(LENGTHS, service_s=0.0005)) for name in "abcd"}
    for name, length in zip("abcd", (16, 8, 4, 4), strict=True):
        await engines[name].hold(length)
    config = EncoderConfig.model_validate({"kind": "encoder", "model": "m", "replicas": 4, "lengths": LENGTHS})
    info = ModelInfo(labels=("length", "first"), max_length=16, pad_token_id=0, architecture="B", multi_label=False)
    tables = [RoutingTable(1.0) for _ in range(2)]
    for table in tables:
        table.sync({name: engine.report() for name, engine in engines.items()})
    gateways = [Classifier("t", config, folder, info, table, caller(table, engines), Quiet()) for table in tables]

    async def client(number: int) -> None:
        await asyncio.sleep(rng.random() * 1.0)
        words = rng.randint(1, 16)
        text = " ".join([f"w{number % 999 + 1}"] * words)
        parameters = ClassifyParameters(function_to_apply="none", slo_ms=20_000)
        [prediction] = await gateways[number % 2].classify([text], parameters)
        scores = dict(zip(prediction.labels, prediction.scores, strict=True))
        assert scores == {"length": words, "first": number % 999 + 1}

    async def planner() -> None:
        """Moves replicas at random, and tells each gateway late, or only the other one, or nobody."""
        while True:
            names = rng.sample("abcd", rng.randint(1, 2))
            others = [engine for name, engine in engines.items() if name not in names]
            if not any(engine.report()["max_length"] == 16 for engine in others):
                await others[0].hold(16)
            for table in rng.sample(tables, rng.randint(0, 2)):
                table.stop_routing(names)
            reports = await asyncio.gather(*(engines[name].hold(rng.choice(LENGTHS)) for name in names))
            for table in rng.sample(tables, rng.randint(0, 2)):
                table.stop_routing(())
                for name, report in zip(names, reports, strict=True):
                    table.observe(name, report)
            await asyncio.sleep(rng.random() * 0.01)

    async def statistics() -> None:
        """Serve's own reports, in the end."""
        while True:
            await asyncio.sleep(0.2)
            stale = {name: engine.report() for name, engine in engines.items()}
            await asyncio.sleep(0.1)
            for table in tables:
                table.stop_routing(())
                table.sync(dict(stale))

    background = [asyncio.create_task(planner()), asyncio.create_task(statistics())]
    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*(client(number) for number in range(REQUESTS)))
    finally:
        for task in background:
            task.cancel()
    switches = sum(engine.report()["version"] for engine in engines.values())
    assert switches > 50
    assert sum(engine.report()["served"] for engine in engines.values()) == REQUESTS
    assert np.sum([engine.report()["waiting"] for engine in engines.values()]) == 0
