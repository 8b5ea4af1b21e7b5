"""How far the simulator is from a live cluster on a small case (Arlo §5.2.1, "simulator calibration and fidelity").

The live cluster is whole, from HTTP to replicas and planner; only the runtimes are timed: they sleep for what a request
takes on the paper's base model, stretched so that this machine's own overhead is small beside it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from ray.serve import Application

from pliant.bench.encoder.profiles import BASE
from pliant.bench.loaded import Loaded
from pliant.bench.report import Figure, median
from pliant.config.encoder import EncoderConfig
from pliant.deployments.app import assemble
from pliant.deployments.encoder.engine import Runtimes
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.kinds import parse
from pliant.policies.encoder.planning import Planner, even_plan
from pliant.simulation.arrivals import Floats, Integers, Recorded, tweet_lengths
from pliant.simulation.encoder.control import Planned
from pliant.simulation.encoder.fleet import static_fleet
from pliant.simulation.encoder.simulator import Service, Simulation

_SERVICE = "timed"
_LENGTHS = (64, 128, 256, 512)
_REPLICAS = 6
_STRETCH = 60
_LOAD = 0.6
"""Of the replicas' time, were each request on the shortest runtime that fits."""
_IDLE_REQUESTS = 40
_WARMUP_S = 20
"""Left out: by then the planner has settled."""
_WORD = "the "
_SPECIAL = 2
"""Tokens that the tokenizer adds to a text."""


def _service_s(max_length: int) -> float:
    return BASE.static_s(max_length) * _STRETCH


class TimedRuntime:
    """Takes as long for a request as a static runtime of the base model, stretched."""

    backend = "timed"
    dynamic = False

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._logits = np.zeros(32, dtype="<f4")

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        time.sleep(_service_s(self.max_length))
        return self._logits


class TimedReplica(EncoderReplica):
    """Our replica, around timed runtimes."""

    def runtimes(self, config: EncoderConfig) -> Runtimes:
        return Loaded(config, TimedRuntime)


@dataclass(frozen=True)
class _Run:
    """What was sent to the live cluster, by second from the first, and how long each took."""

    seconds: Floats
    tokens: Integers
    latencies: Floats


def application(model: str, cpus: float) -> Application:
    """One service of timed replicas."""
    slo_ms = BASE.slo_s * _STRETCH * 1e3
    service = {"kind": "encoder", "model": model, "replicas": _REPLICAS, "lengths": _LENGTHS, "slo_ms": slo_ms}
    config = parse({"gateway": {"cpus": cpus}, "services": {_SERVICE: {**service, "cpus": cpus}}})
    return assemble(config, {_SERVICE: TimedReplica})


async def figures(http: aiohttp.ClientSession, address: str, runs: int, seconds: int) -> list[Figure]:
    """The simulator's errors, relative to the live cluster, over several runs of the same length."""
    overhead_s = await _overhead(http, address)
    errors = []
    for seed in range(runs):
        run = await _live(http, address, _WARMUP_S + seconds, seed)
        errors.append(_errors(run, overhead_s))
    means, tails = zip(*errors, strict=True)
    beside = f"{_REPLICAS} replicas, {runs} x {seconds} s; {overhead_s * 1e3:.1f} ms of overhead measured when idle"
    return [
        median("simulator_error_mean", means, "<= 0.043", beside),
        median("simulator_error_p98", tails, "<= 0.026", "of the same requests"),
    ]


async def _overhead(http: aiohttp.ClientSession, address: str) -> float:
    """What a request takes beyond its runtime, one at a time."""
    beyond = []
    for _ in range(_IDLE_REQUESTS):
        latency, runtime_s = await _send(http, address, 32), _service_s(_LENGTHS[0])
        beyond.append(latency - runtime_s)
    return float(np.median(beyond))


async def _live(http: aiohttp.ClientSession, address: str, seconds: int, seed: int) -> _Run:
    rng = np.random.default_rng(seed)
    lengths = rng.choice(tweet_lengths(), 100_000)
    fitting = np.array(_LENGTHS)[np.searchsorted(_LENGTHS, lengths)]
    rate = _LOAD * _REPLICAS / float(np.mean([_service_s(int(length)) for length in fitting[:1000]]))
    times = np.cumsum(rng.exponential(1 / rate, round(rate * seconds)))
    sent = np.zeros(len(times))
    latencies = np.zeros(len(times))
    started = time.perf_counter()

    async def request(index: int) -> None:
        await asyncio.sleep(started + times[index] - time.perf_counter())
        sent[index] = time.perf_counter() - started
        latencies[index] = await _send(http, address, int(lengths[index]))

    await asyncio.gather(*(request(index) for index in range(len(times))))
    order = np.argsort(sent, kind="stable")
    return _Run(sent[order], lengths[: len(times)][order], latencies[order])


async def _send(http: aiohttp.ClientSession, address: str, tokens: int) -> float:
    body = {"inputs": _WORD * max(1, tokens - _SPECIAL), "parameters": {"top_k": 1, "slo_ms": 600_000}}
    started = time.perf_counter()
    async with http.post(f"{address}/models/{_SERVICE}", data=json.dumps(body)) as response:
        answer = await response.text()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer}")
    return time.perf_counter() - started


def _errors(run: _Run, overhead_s: float) -> tuple[float, float]:
    """|simulated / live - 1| of the mean and of P98, past the warm-up."""
    slo_s = BASE.slo_s * _STRETCH
    fleet = static_fleet(slo_s, even_plan(_LENGTHS, _REPLICAS), {length: _service_s(length) for length in _LENGTHS})
    planned = Planned(Planner(_LENGTHS[-1], slo_s), _LENGTHS)
    stream = Recorded(run.seconds, np.maximum(run.tokens, _SPECIAL + 1))
    outcome = Simulation(fleet, Service(slo_s, overhead_s=overhead_s), [planned]).run(stream, warmup=_WARMUP_S)
    live = run.latencies[run.seconds >= _WARMUP_S]
    mean, tail = float(live.mean()), float(np.quantile(live, 0.98))
    return abs(outcome.latencies.mean / mean - 1), abs(outcome.latencies.quantile(0.98) / tail - 1)
