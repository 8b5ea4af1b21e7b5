"""HAProxy, as `pliant serve` has Ray Serve run it, against Serve's own proxy in Python.

Two clusters stand at the same time, of two gateways each before a model that does nothing, and are asked in turn. At
last a gateway of each is killed under load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count

import aiohttp
import numpy as np
import psutil
from rich.progress import track

from pliant import haproxy
from pliant.bench import workloads
from pliant.bench.edge.server import GATEWAYS, MODEL
from pliant.bench.load import Block, closed_loop, session
from pliant.bench.report import Figure, Options, Report, ratio
from pliant.errors import PliantError
from pliant.models import sources

_OURS, _PYTHON = "haproxy", "python"
_MANY = 32
_CLIENTS = (1, _MANY)
_GATEWAY = "ServeReplica:ours:gateway"


@dataclass(frozen=True)
class _Plan:
    repetitions: int
    alone: int
    """Requests of one client, for each edge and repetition."""
    together: int
    """Requests of all 32 clients."""
    killed_under: int = 800
    """Requests of eight clients, in whose midst a gateway is killed."""
    seed: int = 0


_QUICK = _Plan(repetitions=8, alone=60, together=480)
_FULL = _Plan(repetitions=20, alone=200, together=1500, killed_under=1500)


@dataclass(frozen=True)
class _Edge:
    url: str
    process: subprocess.Popen[str]

    def kill_a_gateway(self) -> None:
        """Without a warning."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        next(each for each in family if _GATEWAY in each.name() or _GATEWAY in " ".join(each.cmdline())).kill()


def run(options: Options) -> Report:
    """Ours is HAProxy."""
    plan = _QUICK if options.quick else _FULL
    settings = haproxy.environment(None)
    if not settings:
        raise PliantError(f"there is no HAProxy; {haproxy.MISSING}")
    sources.fetch(MODEL)
    with _running(settings) as ours, _running({haproxy.SWITCH: "0"}) as python:
        blocks, lost = asyncio.run(_measure({_OURS: ours, _PYTHON: python}, options, plan))
    figures = [figure for clients in _CLIENTS for figure in _figures(blocks, clients)]
    figures += [
        Figure(f"edge_lost_of_a_killed_gateway_{edge}", number, number, number, "0" if edge == _OURS else "", beside)
        for edge, number in lost.items()
        for beside in (f"of {plan.killed_under} requests of 8 clients",)
    ]
    return Report(figures, {**asdict(plan), "model": MODEL, "gateways": GATEWAYS}, {})


def _figures(blocks: dict[tuple[str, int], list[Block]], clients: int) -> Iterator[Figure]:
    found = {edge: blocks[edge, clients] for edge in (_OURS, _PYTHON)}
    latency = {edge: [float(np.median(block.latencies)) * 1e3 for block in each] for edge, each in found.items()}
    rate = {edge: [block.throughput for block in each] for edge, each in found.items()}
    for name, values, target, unit in (("latency", latency, "<= 1", "ms"), ("throughput", rate, ">= 1", "requests/s")):
        beside = ", ".join(f"{edge} {statistics.median(each):.3g}" for edge, each in values.items()) + f" {unit}"
        yield ratio(f"edge_{name}_vs_python_proxy_c{clients}", values[_OURS], values[_PYTHON], target, beside)


@contextlib.contextmanager
def _running(settings: dict[str, str]) -> Iterator[_Edge]:
    """A cluster in a process of its own, as Ray reads its settings but once."""
    command = [sys.executable, "-m", "pliant.bench.edge.server"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        command, env={**kept, **settings}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    try:
        url = next((line for line in process.stdout if line.startswith("http")), "").strip()
        if not url:
            raise PliantError("a cluster to compare with did not start")
        yield _Edge(url, process)
    finally:
        process.stdin.close()
        process.wait()


async def _measure(
    edges: dict[str, _Edge], options: Options, plan: _Plan
) -> tuple[dict[tuple[str, int], list[Block]], dict[str, int]]:
    """The blocks by edge and clients; and how many requests each lost when one of its gateways was killed."""
    rng = random.Random(plan.seed)
    bodies = [json.dumps({"inputs": text}).encode() for text in workloads.texts(options.data, rng)]
    blocks: dict[tuple[str, int], list[Block]] = {(edge, clients): [] for edge in edges for clients in _CLIENTS}
    async with session() as http:
        for edge in edges.values():
            await closed_loop(http, edge.url, rng.choices(bodies, k=plan.together), _MANY)
        for _ in track(range(plan.repetitions), "edge", transient=True):
            for clients, requests in zip(_CLIENTS, (plan.alone, plan.together), strict=True):
                sent = rng.choices(bodies, k=requests)
                for name in rng.sample(sorted(edges), len(edges)):
                    blocks[name, clients].append(await closed_loop(http, edges[name].url, sent, clients))
        lost = {name: await _lost(http, edge, rng.choices(bodies, k=plan.killed_under)) for name, edge in edges.items()}
    return blocks, lost


async def _lost(http: aiohttp.ClientSession, edge: _Edge, bodies: list[bytes]) -> int:
    """How many of eight clients' requests have no answer when a gateway is killed after a third of them."""
    pending, sent, failed = iter(bodies), count(), 0

    async def client() -> None:
        nonlocal failed
        for body in pending:
            if next(sent) == len(bodies) // 3:
                edge.kill_a_gateway()
            try:
                async with http.post(edge.url, data=body, headers={"Content-Type": "application/json"}) as response:
                    failed += response.status != 200
            except aiohttp.ClientError:
                failed += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(client())
    return failed
