"""The live service under one task: cascades against the best single model and the large one, over HTTP (Tabi §7.1).

One cascade is of models, the other of one encoder whose layers learned with its exits. Everything is as in production,
from the HTTP server to the replicas: cascades are profiled through their levels' own replicas before they serve. Each
system has as many replicas as the cascade of models has levels.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from ray.serve import Application

from pliant.bench.cascade import compiled, exit_levels
from pliant.bench.cascade.levels import Prepared
from pliant.bench.cascade.study import LOSSES, Studied
from pliant.bench.cluster import cluster
from pliant.bench.load import Block, LoadError, closed_loop, session
from pliant.bench.report import Figure, median, ratio
from pliant.cache import cache_folder
from pliant.deployments.app import assemble
from pliant.deployments.kinds import parse
from pliant.policies.cascade.calibration import Floats
from pliant.texts import Text, parts

LOADS = (0.2, 0.5, 0.8)
"""Of what the best single model's service can answer."""
OURS, ONE_ENCODER, SINGLE, LARGE = "bench-cascade", "bench-one-encoder", "best-single", "most-accurate"
_CASCADES = (OURS, ONE_ENCODER)
_WITH_EXITS = "with-exits"
_SLO_MS = 10_000
_NEVER_LATE_MS = 600_000
_RESERVED = 0.02
"""Of a CPU, that each replica reserves: all run on whatever the machine has."""
_READY_WITHIN_S = 900.0
_POLL_S = 1.0


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    profiled: int
    """Labelled texts that the cascade is profiled on, at most."""
    texts: int
    """Of the test split, that each system answers in each repetition."""
    repetitions: int


@dataclass(frozen=True)
class Measured:
    """Seconds that clients saw [texts] by system, in repetitions that ran side by side."""

    serves: Mapping[str, str]
    """What each cascade says of itself."""
    alone: Mapping[str, Sequence[Floats]]
    """One text after the other."""
    capacity: float
    """Texts per second that the best single model's service can answer."""
    poisson: Mapping[float, Mapping[str, Sequence[Floats]]]
    """At random times, by load."""


def run(prepared: Prepared, studied: Studied, scale: Scale, progress: Callable[[str], object]) -> Measured:
    """Serve the task, and measure it. Raises LoadError if a request fails, or a cascade never gets ready."""
    texts = [text.text for text in prepared.splits.test]
    for name in _CASCADES:
        for table in (cache_folder() / "cascades").glob(f"{name}-*/table.json"):  # a profile of another time and load
            shutil.rmtree(table.parent)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.jsonl"
        labelled = prepared.splits.choose[: scale.profiled]
        data.write_text("".join(json.dumps({**_fields(text), "label": label}) + "\n" for text, label in labelled))
        with cluster({"bench": _application(prepared, studied, data)}) as address:
            return asyncio.run(_measure(f"{address}/bench", texts, scale, progress))


def _application(prepared: Prepared, studied: Studied, data: Path) -> Application:
    """The levels, and the best single model, the most accurate one and one with exits, on as many replicas each."""
    first, others = studied.served[0], [name for name in prepared.folders if name != studied.large]
    levels = first.cascade.levels if len(first.cascade.levels) > 1 else (others[0], studied.large)
    pool = {
        "kind": "encoder",
        "lengths": [compiled.longest(prepared)],
        "slo_ms": _SLO_MS,
        "truncate": True,
        "cpus": _RESERVED,
    }
    services: dict[str, Any] = {
        level: {**pool, "model": str(prepared.folders[level]), "replicas": 1} for level in levels
    }
    with_exits, after = exit_levels.learned(prepared)
    models = {SINGLE: prepared.folders[first.single], LARGE: prepared.folders[studied.large], _WITH_EXITS: with_exits}
    for name, model in models.items():
        services[name] = {**pool, "model": str(model), "replicas": len(levels)}
    exits = [*(f"{_WITH_EXITS}@{layers}" for layers in after), _WITH_EXITS]
    for name, chain in ((OURS, levels), (ONE_ENCODER, exits)):
        asked = {"data": str(data), "accuracy_loss": LOSSES[0], "slo_ms": _SLO_MS}
        services[name] = {"kind": "cascade", "levels": chain, **asked}
    return assemble(parse({"gateway": {"cpus": _RESERVED}, "services": services}))


async def _measure(address: str, texts: Sequence[Text], scale: Scale, progress: Callable[[str], object]) -> Measured:
    rng = random.Random(0)
    systems = (*_CASCADES, SINGLE, LARGE)
    alone: dict[str, list[Floats]] = {name: [] for name in systems}
    at_random = (*_CASCADES, SINGLE)
    poisson: dict[float, dict[str, list[Floats]]] = {load: {name: [] for name in at_random} for load in LOADS}
    async with session() as http:
        serves = {name: await _ready(http, address, name, progress) for name in _CASCADES}
        for name in systems:
            await _one_by_one(http, address, name, texts[: scale.texts])
        capacity = await _capacity(http, address, texts[: scale.texts])
        for repetition in range(scale.repetitions):
            drawn = rng.sample(list(texts), min(scale.texts, len(texts)))
            progress(f"live, one after the other, {repetition + 1} of {scale.repetitions}")
            for name in rng.sample(systems, len(systems)):
                alone[name].append((await _one_by_one(http, address, name, drawn)).latencies)
            for load, found in poisson.items():
                progress(f"live, Poisson arrivals at {load:g}, {repetition + 1} of {scale.repetitions}")
                arrivals = np.cumsum([rng.expovariate(load * capacity) for _ in drawn]).tolist()
                for name in rng.sample(list(found), len(found)):
                    found[name].append(await at(http, f"{address}/models/{name}", drawn, arrivals))
    return Measured(serves, alone, capacity, poisson)


async def _ready(http: aiohttp.ClientSession, address: str, name: str, progress: Callable[[str], object]) -> str:
    """Wait until the cascade `name` serves; says what."""
    give_up = time.monotonic() + _READY_WITHIN_S
    state = "no answer"
    while time.monotonic() < give_up:
        async with http.get(f"{address}/stats") as response:
            if response.status == 200:
                told = (await response.json())["services"][name]
                state = told["state"]
                if told["ready"]:
                    return str(state)
        progress(f"live: {state}")
        await asyncio.sleep(_POLL_S)
    raise LoadError(f"{name} was not ready within {_READY_WITHIN_S:.0f} s: {state}")


def _fields(text: Text) -> dict[str, str]:
    """As clients and files of labelled texts give it."""
    return dict(zip(("text", "text_pair"), parts(text), strict=False))


def _body(text: Text) -> bytes:
    given = text if isinstance(text, str) else _fields(text)
    return json.dumps({"inputs": given, "parameters": {"slo_ms": _NEVER_LATE_MS, "top_k": 1}}).encode()


async def _one_by_one(http: aiohttp.ClientSession, address: str, name: str, texts: Sequence[Text]) -> Block:
    return await closed_loop(http, f"{address}/models/{name}", [_body(text) for text in texts], 1)


async def _capacity(http: aiohttp.ClientSession, address: str, texts: Sequence[Text]) -> float:
    """Texts per second that the best single model's service answers to clients who never stop."""
    block = await closed_loop(http, f"{address}/models/{SINGLE}", [_body(text) for text in texts], 8)
    return block.throughput


async def at(http: aiohttp.ClientSession, url: str, texts: Sequence[Text], arrivals: Sequence[float]) -> Floats:
    """Seconds from arrival to answer of each text [n], sent at so many seconds from now."""
    start = time.perf_counter()

    async def one(text: Text, at_s: float) -> float:
        await asyncio.sleep(start + at_s - time.perf_counter())
        await closed_loop(http, url, [_body(text)], 1)
        return time.perf_counter() - start - at_s

    return np.array(await asyncio.gather(*map(one, texts, arrivals)))


def figures(measured: Measured, task: str) -> list[Figure]:
    """With the task's name behind each."""
    found = [median(f"live_capacity_of_best_single_{task}", [measured.capacity], "", "texts per second")]
    for name, which in ((OURS, "live"), (ONE_ENCODER, "live_one_encoder")):
        ours, single, large = (measured.alone[system] for system in (name, SINGLE, LARGE))
        found += [
            _means(f"{which}_mean_latency_vs_best_single_{task}", ours, single, measured.serves[name]),
            ratio(f"{which}_p99_latency_vs_large_{task}", _p99s(ours), _p99s(large)),
        ]
        for load, by_system in measured.poisson.items():
            ours, single = by_system[name], by_system[SINGLE]
            found += [
                _means(f"{which}_poisson_{load:g}_mean_latency_vs_best_single_{task}", ours, single),
                ratio(f"{which}_poisson_{load:g}_p99_latency_vs_best_single_{task}", _p99s(ours), _p99s(single)),
            ]
    return found


def _means(name: str, ours: Sequence[Floats], theirs: Sequence[Floats], beside: str = "") -> Figure:
    mine, others = ([float(one.mean()) for one in of] for of in (ours, theirs))
    told = f"{1e3 * np.median(mine):.2f} against {1e3 * np.median(others):.2f} ms"
    return ratio(name, mine, others, "", "; ".join(filter(None, (told, beside))))


def _p99s(repetitions: Sequence[Floats]) -> list[float]:
    return [float(np.quantile(of, 0.99)) for of in repetitions]
