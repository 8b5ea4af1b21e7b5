"""Replicas change lengths while two gateways believe different, outdated plans: every request is answered once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import pytest
from support.call_path import CallPath
from support.doubles import Sleepers
from support.text_service import TextRecorder
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.errand import TextWant
from pliant.deployments.encoder.messages import Answer, Query, Report
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk
from pliant.models.encoder_info import EncoderInfo

pytestmark = pytest.mark.virtual_time
LENGTHS = (4, 8, 16)
REQUESTS = 400


class Replica:
    """An engine behind its desk, as far away as another process."""

    def __init__(self) -> None:
        self.engine = Engine(Sleepers(LENGTHS, service_s=0.0005))
        self.desk: Desk[Query, Answer] = Desk("t", self.engine.infer, self.engine.seconds)

    def report(self) -> Report:
        return {**self.engine.report(), "held": self.desk.held.amounts()}

    async def hold(self, max_length: int) -> Report:
        await self.engine.hold(max_length)
        return self.report()


class Transport:
    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas

    async def one(self, parcel: Parcel[Query]) -> Answer | Refusal:
        await asyncio.sleep(random.random() * 0.002)
        return await self._replicas[parcel.replica].desk.one(parcel)

    async def several(self, parcel: Parcel[Query]) -> AsyncGenerator[list[tuple[int, Answer | Refusal]], None]:
        await asyncio.sleep(random.random() * 0.002)
        async for part in self._replicas[parcel.replica].desk.several(parcel):
            yield part


class Gateway(CallPath[TextWant, Query, Answer, Report, TextRecorder]):
    def __init__(self, folder: Path, replicas: Mapping[str, Replica]) -> None:
        config = EncoderConfig.model_validate({"kind": "encoder", "model": "m", "replicas": 4, "lengths": LENGTHS})
        info = EncoderInfo("classify", ("length", "first"), 16, pairs=False, scores="softmax", vocabulary=6)
        chooser = EncoderChooser(1.0)
        super().__init__(chooser, Transport(replicas), TextRecorder())
        self.classifier = Classifier("t", config, folder, info, chooser, self.table, self.caller, self.recorder)
        self.table.sync({name: replica.report() for name, replica in replicas.items()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{index}": index for index in range(1, 1000)}}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_fails_whatever_the_gateways_believe(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    replicas = {name: Replica() for name in "abcd"}
    for name, length in zip("abcd", (16, 8, 4, 4), strict=True):
        await replicas[name].hold(length)
    gateways = [Gateway(folder, replicas) for _ in range(2)]
    tables = [gateway.table for gateway in gateways]

    async def client(number: int) -> None:
        await asyncio.sleep(rng.random() * 1.0)
        words = rng.randint(1, 16)
        text = " ".join([f"w{number % 999 + 1}"] * words)
        parameters = ClassifyParameters(function_to_apply="none", slo_ms=20_000)
        [prediction] = await gateways[number % 2].classifier.classify([text], parameters)
        scores = dict(zip(prediction.labels, prediction.scores, strict=True))
        assert scores == {"length": words, "first": number % 999 + 1}

    async def planner() -> None:
        """Moves replicas at random, and tells each gateway late, or only the other one, or nobody."""
        while True:
            names = rng.sample("abcd", rng.randint(1, 2))
            others = [replica for name, replica in replicas.items() if name not in names]
            if not any(replica.report()["max_length"] == 16 for replica in others):
                await others[0].hold(16)
            for table in rng.sample(tables, rng.randint(0, 2)):
                table.stop_routing(names)
            reports = await asyncio.gather(*(replicas[name].hold(rng.choice(LENGTHS)) for name in names))
            for table in rng.sample(tables, rng.randint(0, 2)):
                table.stop_routing(())
                for name, report in zip(names, reports, strict=True):
                    table.observe(name, report)
            await asyncio.sleep(rng.random() * 0.01)

    async def statistics() -> None:
        """Serve's own reports, in the end."""
        while True:
            await asyncio.sleep(0.2)
            stale = {name: replica.report() for name, replica in replicas.items()}
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
    reports = [replica.report() for replica in replicas.values()]
    assert sum(report["version"] for report in reports) > 50, "they hold other lengths all the time"
    assert sum(report["served"] for report in reports) == REQUESTS
    assert [(report["waiting"], report["held"]) for report in reports] == [(0, {})] * 4
    for gateway in gateways:
        assert gateway.recorder.ends == [Outcome.OK] * (REQUESTS // 2)
        assert set(gateway.recorder.retries) <= {"moved"}
        assert {facts["outstanding"] for facts in gateway.table.replicas().values()} == {0}
