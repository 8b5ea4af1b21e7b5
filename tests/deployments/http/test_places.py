"""What is full leaves room for everything else: probes, status pages, administration, other services."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from support.asgi import Exchange

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.places import most_at_once, most_of_a_service
from pliant.deployments.http.texts import Prediction
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.services import Services

pytestmark = pytest.mark.virtual_time

PLACES = 8
BODY = b'{"inputs": "a"}'
PROBES = ["/v2/health/live", "/v2/health/ready", "/stats", "/metrics", "/v2", "/v2/models/slow"]


class Classifier:
    """Answers once it may."""

    labels = ("yes", "no")
    ready = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.may = asyncio.Event()

    async def classify(self, texts: Sequence[str], parameters: Any) -> list[Prediction]:
        await self.may.wait()
        return [Prediction(["yes"], [1.0], None) for _ in texts]


@pytest.fixture
def classifiers() -> dict[str, Classifier]:
    return {name: Classifier(name) for name in ("slow", "quick")}


@pytest.fixture
def app(classifiers: dict[str, Classifier]) -> FastAPI:
    classifiers["quick"].may.set()
    config = GatewayConfig(max_ongoing_requests=PLACES)
    return application(config, Services.of("texts", classifiers), dict, lambda: b"# nothing\n")


async def asked(app: FastAPI, service: str, body: bytes = BODY) -> Exchange:
    exchange = Exchange(app, f"/models/{service}")
    exchange.send(body)
    return await exchange.settled()


async def got(app: FastAPI, path: str) -> int:
    exchange = Exchange(app, path, "GET")
    return (await exchange.over()).status


async def test_a_service_that_is_full_leaves_places_to_others(app: FastAPI, classifiers: dict[str, Classifier]) -> None:
    slow = [await asked(app, "slow") for _ in range(PLACES * 3 // 4)]
    refused = await asked(app, "slow")
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert "slow has 6 requests" in refused.json()["error"]
    assert (await asked(app, "quick")).status == 200
    assert [await got(app, path) for path in PROBES] == [200] * len(PROBES)
    classifiers["slow"].may.set()
    assert [(await exchange.over()).status for exchange in slow] == [200] * len(slow)
    assert (await asked(app, "slow")).status == 200


async def test_who_finds_no_place_is_counted_once(classifiers: dict[str, Classifier]) -> None:
    counted: list[tuple[str, Outcome]] = []
    config = GatewayConfig(max_ongoing_requests=PLACES)
    services = Services.of("texts", classifiers)
    app = application(config, services, dict, bytes, refused=lambda *what: counted.append(what))
    held = [await asked(app, "slow") for _ in range(PLACES * 3 // 4)]
    assert (await asked(app, "slow")).status == 429
    held += [await asked(app, "quick") for _ in range(PLACES - len(held))]
    assert counted == [("slow", Outcome.SHED)]
    assert [(await asked(app, name)).status for name in ("quick", "slow")] == [429] * 2
    assert counted[1:] == [("quick", Outcome.SHED), ("slow", Outcome.SHED)]
    bodies = [Exchange(app, "/models/quick") for _ in range(PLACES)]
    for each in bodies:
        each.send(b"{", more=True)
    await asyncio.sleep(2)
    late = Exchange(app, "/models/slow")
    late.send(b"{", more=True)
    await bodies[0].over()
    assert counted[3:] == [("quick", Outcome.REJECTED)]
    for each in (*bodies[1:], late, *held):
        await each.left()


async def test_who_leaves_gives_the_place_back(app: FastAPI) -> None:
    for _ in range(2 * PLACES):
        exchange = await asked(app, "slow")
        await exchange.left()
    assert not (await asked(app, "slow")).status


async def test_all_services_together_are_bounded(classifiers: dict[str, Classifier]) -> None:
    config = GatewayConfig(max_ongoing_requests=2, max_per_service=2)
    app = application(config, Services.of("texts", classifiers), dict, lambda: b"# nothing\n")
    for _ in range(2):
        await asked(app, "slow")
    refused = await asked(app, "quick")
    assert refused.status == 429
    assert "2 requests to services" in refused.json()["error"]
    assert [await got(app, path) for path in PROBES] == [200] * len(PROBES)


async def test_slow_bodies_keep_nobody_waiting(app: FastAPI) -> None:
    """Those that came first make way once they have been slow; until then they are as good as any."""
    slow = [Exchange(app, "/models/quick") for _ in range(PLACES)]
    await asyncio.sleep(0.1)
    assert (await asked(app, "quick")).status == 429
    assert [await got(app, path) for path in PROBES] == [200] * len(PROBES)
    await asyncio.sleep(1)
    assert (await asked(app, "quick")).status == 200
    assert (await slow[0].over()).status == 408
    assert slow[0].headers["retry-after"] == "1"
    slow[1].send(BODY)
    assert (await slow[1].over()).status == 200


@pytest.mark.parametrize(("most", "services", "share"), [(None, 1, 8), (None, 2, 6), (3, 1, 3), (3, 2, 3)])
def test_the_most_of_one_service(most: int | None, services: int, share: int) -> None:
    assert most_of_a_service(GatewayConfig(max_ongoing_requests=8, max_per_service=most), services) == share


def test_serve_lets_through_what_there_are_places_for() -> None:
    config = GatewayConfig(max_ongoing_requests=8)
    assert most_at_once(config) > 2 * 8 + 16 + 16 + 64
