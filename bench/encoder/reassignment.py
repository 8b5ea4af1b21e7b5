"""Re-assignment under load: the lengths of the texts change again and again, and replicas follow (Arlo §4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from ray.serve import Application

from pliant.bench.report import Figure, median
from pliant.deployments.app import assemble
from pliant.deployments.kinds import parse

_SERVICE = "moving"
_LENGTHS = (32, 64, 128)
_TEXTS = ("yield " * 20, "yield " * 100)
"""Of about 20 and 100 tokens: the shortest and the longest runtime."""
_PHASE_S = 10.0
_CLIENTS = 8
_SLO_MS = 10_000
_POLL_S = 0.1
_MOST_PHASES = 30


@dataclass(frozen=True)
class Outcome:
    """What clients saw of replicas that moved."""

    answered: int
    failed: int
    moves_s: Sequence[float]
    """For each batch of moves, from when routing stopped until the replicas were routed to again."""


def application(model: str, reserved: Mapping[str, float]) -> Application:
    """One service whose three replicas share three lengths, each of which holds one."""
    service = {"kind": "encoder", "model": model, "replicas": 3, "lengths": _LENGTHS, "slo_ms": _SLO_MS, "period_s": 10}
    service |= {"residency": "one", **reserved}
    config = parse({"gateway": {"cpus": reserved["cpus"]}, "services": {_SERVICE: service}})
    return assemble(config)


async def measure(http: aiohttp.ClientSession, address: str, requests: int) -> Outcome:
    """Send at least `requests` from several clients, short texts and long ones in turn."""
    answered = failed = 0
    moves: dict[int, float] = {}
    text = _TEXTS[0]
    stopped = False

    async def client() -> None:
        nonlocal answered, failed
        while not stopped:
            body = json.dumps({"inputs": text, "parameters": {"top_k": 1}})
            async with http.post(f"{address}/models/{_SERVICE}", data=body) as response:
                await response.read()
                answered += response.status == 200
                failed += response.status != 200

    async def watch() -> None:
        while not stopped:
            async with http.get(f"{address}/stats") as response:
                plan: dict[str, Any] = (await response.json())["services"][_SERVICE]["plan"]
            if plan.get("moves"):
                moves[plan["moves"]] = plan["last_move_s"]
            await asyncio.sleep(_POLL_S)

    running = [asyncio.create_task(client()) for _ in range(_CLIENTS)] + [asyncio.create_task(watch())]
    for phase in range(_MOST_PHASES):
        text = _TEXTS[phase % 2]
        await asyncio.sleep(_PHASE_S)
        if answered + failed >= requests:
            break
    stopped = True
    await asyncio.gather(*running)
    return Outcome(answered, failed, list(moves.values()))


def figures(outcome: Outcome) -> list[Figure]:
    """Failures and the time that a move takes."""
    beside = f"of {outcome.answered + outcome.failed:,} requests, while replicas moved {len(outcome.moves_s)} times"
    return [
        Figure("reassignment_failed_requests", outcome.failed, outcome.failed, outcome.failed, "0", beside),
        median("seconds_per_move", outcome.moves_s, "<= 1", "from when routing stops to when it goes on"),
    ]
