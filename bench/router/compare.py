"""What our gateway and router cost over bare Ray Serve, and what the dispatcher costs by itself.

The same model, which does nothing, stands behind both, in one cluster: what is measured is parsing, validation,
tokenization, routing and metrics. Bare Serve parses the body and tokenizes nothing, so 1 cannot be reached. What ours
costs while its console is looked at, and with traces, is compared with ours without.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot
from rich.progress import track

from pliant.bench import workloads
from pliant.bench.cluster import cluster
from pliant.bench.load import Block, LoadError, closed_loop, session
from pliant.bench.report import Options, Report, median, ratio
from pliant.bench.router.apps import bare, ours, traced
from pliant.bench.router.dispatch_cost import cost_in_method_calls
from pliant.bench.router.streams import FEW, MANY, paced, tpot_p99
from pliant.bench.router.two_gateways import p98_against_one
from pliant.bench.router.watched import VIEWERS, Collector, collector, watched
from pliant.models import sources

_MODEL = "zoo/topics-large"
_SERVICE = "topics"
_LANGUAGE_MODEL = "zoo/tiny-llama"
_OURS = "ours"
_PACED = "paced"
_BARE = ("bare", "bare-same-loop")
_TRACED, _WATCHED = "ours-traced", "ours-watched"
_REPLICA_CPUS = 0.05
_MANY = 32
_TEXTS = 64
"""In one request, as many as there may be."""
_NEVER_LATE_MS = 60_000
_FLEETS = (8, 64, 1000)
_BUSY, _QUEUED = 0.6, 20.0
"""Outstanding requests per replica."""
_SHARED_FLEETS = (16, 32)
_LOADS = (0.6, 0.75, 0.9)
_SHARED = "simulated, 32 replicas at 60% load; reports are one to two seconds old"


@dataclass(frozen=True)
class _Plan:
    repetitions: int
    alone: int
    """Requests of one client, for each system and repetition."""
    together: int
    """Requests of all 32 clients."""
    dispatches: int
    simulated_s: float
    """Of one gateway's service, and of two."""
    streams: int
    """Blocks of few and of many of them."""
    tokens: int
    """Of each stream."""
    replicas: int = 3
    seed: int = 0


_QUICK = _Plan(repetitions=8, alone=80, together=480, dispatches=100_000, simulated_s=60.0, streams=2, tokens=40)
_FULL = _Plan(repetitions=30, alone=200, together=1500, dispatches=500_000, simulated_s=300.0, streams=5, tokens=100)


def run(options: Options) -> Report:
    """Ours against bare Serve with its router in a thread (the default) and in the ingress's event loop."""
    plan = _QUICK if options.quick else _FULL
    rng = random.Random(plan.seed)
    for model in (_MODEL, _LANGUAGE_MODEL):
        sources.fetch(model)
    busy, queued = (
        {
            replicas: [cost_in_method_calls(replicas, load, plan.dispatches, plan.seed + number) for number in range(3)]
            for replicas in _FLEETS
        }
        for load in (_BUSY, _QUEUED)
    )
    dearest = max(busy, key=lambda replicas: statistics.median(busy[replicas]))
    apart = {
        (replicas, load): [p98_against_one(replicas, load, plan.simulated_s, plan.seed + n) for n in range(3)]
        for replicas in _SHARED_FLEETS
        for load in _LOADS
    }
    with collector() as spans:
        applications = {
            _OURS: ours(_MODEL, plan.replicas, _REPLICA_CPUS, _SERVICE),
            _BARE[0]: bare(_MODEL, plan.replicas, _REPLICA_CPUS, same_loop=False),
            _BARE[1]: bare(_MODEL, plan.replicas, _REPLICA_CPUS, same_loop=True),
            _TRACED: traced(ours(_MODEL, plan.replicas, _REPLICA_CPUS, _SERVICE), spans.address),
            _PACED: paced(_LANGUAGE_MODEL, _REPLICA_CPUS),
        }
        with cluster(applications) as address:
            texts = workloads.texts(options.data, rng)
            alone, together, batches = asyncio.run(_measure(address, texts, plan, rng, spans))
            few, many = asyncio.run(_streams(f"{address}/{_PACED}", plan))

    latencies = {
        system: [float(np.median(block.latencies)) * 1e3 for block in blocks] for system, blocks in alone.items()
    }
    rates = {system: [block.throughput for block in blocks] for system, blocks in together.items()}
    quickest = min(_BARE, key=lambda system: statistics.median(latencies[system]))
    widest = max(_BARE, key=lambda system: statistics.median(rates[system]))
    figures = [
        ratio("gateway_latency_ratio_c1", latencies[_OURS], latencies[quickest], "<= 1.15", _beside(latencies, "ms")),
        ratio("console_latency_ratio_c1", latencies[_WATCHED], latencies[_OURS], "<= 1.05", f"with {VIEWERS} viewers"),
        ratio("tracing_latency_ratio_c1", latencies[_TRACED], latencies[_OURS], "<= 1.1", "every request is sampled"),
        ratio("gateway_throughput_ratio_c32", rates[_OURS], rates[widest], ">= 0.95", _beside(rates, "requests/s")),
        ratio(
            "batch64_latency_vs_64_calls",
            [whole * 1e3 for whole, _ in batches],
            [single * 1e3 for _, single in batches],
            "<= 0.4",
            f"{_TEXTS} texts, in one request or each in its own, all at once",
        ),
        ratio(
            f"tpot_p99_{MANY}_streams_vs_{FEW}",
            many,
            few,
            "<= 2",
            f"{statistics.median(many) * 1e3:.0f} and {statistics.median(few) * 1e3:.0f} ms, of steps of 100 ms",
        ),
        median("dispatch_cost_in_method_calls", busy[dearest], "<= 20", _of_fleets(busy)),
        median("dispatch_cost_in_method_calls_queued", queued[dearest], beside=_of_fleets(queued)),
        median("two_gateways_p98_vs_one", apart[_SHARED_FLEETS[-1], _LOADS[0]], "<= 1.15", _SHARED),
        *(
            median(f"two_gateways_p98_vs_one_{replicas}_replicas_load_{load:.0%}".removesuffix("%"), found)
            for (replicas, load), found in apart.items()
        ),
    ]
    config = {**asdict(plan), "model": _MODEL, "best_baseline_c1": quickest, "best_baseline_c32": widest}
    return Report(figures, config, {"latency": _plot(alone, together)})


async def _measure(
    address: str, texts: list[str], plan: _Plan, rng: random.Random, spans: Collector
) -> tuple[dict[str, list[Block]], dict[str, list[Block]], list[tuple[float, float]]]:
    """The blocks of each system with 1 client, and of some with 32; and the seconds until ours has answered 64 texts,
    which come in one request or in as many."""
    parameters = {"slo_ms": _NEVER_LATE_MS}
    bodies = [json.dumps({"inputs": text, "parameters": parameters}).encode() for text in texts]
    urls = {system: f"{address}/{system}/models/{_SERVICE}" for system in (_OURS, *_BARE, _TRACED)}
    alone: dict[str, list[Block]] = {system: [] for system in (*urls, _WATCHED)}
    together: dict[str, list[Block]] = {system: [] for system in (_OURS, *_BARE)}
    batches = []
    async with session() as http:
        for url in urls.values():
            await closed_loop(http, url, rng.choices(bodies, k=plan.together), _MANY)
        await spans.some()
        for _ in track(range(plan.repetitions), "router", transient=True):
            sent = rng.choices(bodies, k=plan.alone)
            for system in rng.sample(sorted(alone), len(alone)):
                if system == _WATCHED:
                    async with watched(http, f"{address}/{_OURS}"):
                        alone[system].append(await closed_loop(http, urls[_OURS], sent, 1))
                else:
                    alone[system].append(await closed_loop(http, urls[system], sent, 1))
            sent = rng.choices(bodies, k=plan.together)
            for system in rng.sample(sorted(together), len(together)):
                together[system].append(await closed_loop(http, urls[system], sent, _MANY))
            chosen = rng.choices(texts, k=_TEXTS)
            batch = json.dumps({"inputs": chosen, "parameters": parameters}).encode()
            singles = [json.dumps({"inputs": text, "parameters": parameters}).encode() for text in chosen]
            whole = await closed_loop(http, urls[_OURS], [batch], 1)
            apart = await closed_loop(http, urls[_OURS], singles, _TEXTS)
            batches.append((whole.seconds, apart.seconds))
    shapes = {system: _shape(blocks[0].answers[0]) for system, blocks in alone.items()}
    if len(set(shapes.values())) > 1:
        raise LoadError(f"the systems answer in different shapes: {shapes}")
    return alone, together, batches


async def _streams(address: str, plan: _Plan) -> tuple[list[float], list[float]]:
    """P99 of what clients wait between two pieces, with few streams at a time and with many."""
    async with session() as http:
        await tpot_p99(http, address, FEW, plan.tokens)
        found = [
            (await tpot_p99(http, address, FEW, plan.tokens), await tpot_p99(http, address, MANY, plan.tokens))
            for _ in track(range(plan.streams), "streams", transient=True)
        ]
    few, many = zip(*found, strict=True)
    return list(few), list(many)


def _shape(answer: list[list[dict[str, Any]]]) -> str:
    return str([[sorted(item) for item in labels] for labels in answer])


def _beside(values: dict[str, list[float]], unit: str) -> str:
    listed = ", ".join(f"{system} {statistics.median(blocks):.3g}" for system, blocks in values.items())
    return f"{listed} {unit}"


def _of_fleets(costs: dict[int, list[float]]) -> str:
    listed = ", ".join(f"{statistics.median(found):.3g} for {replicas:,}" for replicas, found in costs.items())
    return f"{listed} replicas"


def _plot(alone: dict[str, list[Block]], together: dict[str, list[Block]]) -> Plot:
    plot, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, blocks, title in zip(panels, (alone, together), ("1 client", f"{_MANY} clients"), strict=True):
        for system, done in blocks.items():
            milliseconds = np.sort(np.concatenate([block.latencies for block in done])) * 1e3
            axes.plot(milliseconds, np.linspace(0, 1, len(milliseconds)), label=system)
        axes.set(title=title, xlabel="latency (ms)")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel("share of requests")
    panels[0].legend()
    return plot
