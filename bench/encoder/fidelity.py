"""How far the simulator is from a live cluster on a small case (Arlo §5.2.1, "simulator calibration and fidelity").

The live cluster is whole, from HTTP to replicas and planner; only the runtimes are timed: they sleep for what passes
were measured to take, stretched so that this machine's own overhead is small beside it. Replicas have packed runtimes,
as they are served, or one length each, as in the paper.

A machine that others use is never the same twice. So the noise is measured while the live cluster runs, and then drawn
from in the simulation: what passes took over what they should, and what requests take on their way to a replica that
answers at once, and back. What is compared is what becomes of that in queues.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

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
from pliant.formats.pass_times import PassTimes
from pliant.kernels.encoder import timed_runtime
from pliant.kernels.encoder.texts import Output, Text
from pliant.models import sources
from pliant.policies.encoder.planning import Planner, Residency, even_plan
from pliant.simulation.arrivals import Floats, Integers, Recorded, tweet_lengths
from pliant.simulation.encoder.batched import BatchedSimulation, packed_simulation
from pliant.simulation.encoder.control import Planned
from pliant.simulation.encoder.fleet import static_fleet
from pliant.simulation.encoder.simulator import Service, Simulation

_LENGTHS = (64, 128, 256, 512)
_REPLICAS = 6
_MEAN_S = 0.12
"""Of a text by itself."""
_SLO_S = 9.0
_HOP = "hop"
"""The service that answers at once."""
_HOP_EVERY_S = 0.1
_WARMUP_S = 20
"""Left out: by then the planner has settled."""
_WORD = "the "
_SPECIAL = 2
"""Tokens that the tokenizer adds to a text."""
_LABELS = 32


def _slept(seconds: float) -> np.ndarray:
    """Logits, after so many seconds: the first is how long they were, over what they should have been."""
    started = time.perf_counter()
    time.sleep(seconds)
    logits = np.zeros(_LABELS, dtype="<f4")
    logits[0] = (time.perf_counter() - started) / seconds if seconds else 1.0
    return logits


class _StaticRuntime:
    """Takes so many seconds for every request."""

    backend = "timed"
    dynamic = False

    def __init__(self, max_length: int, seconds: float) -> None:
        self.max_length = max_length
        self._seconds = seconds

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        return _slept(self._seconds)


class _PackedRuntime:
    """Takes for a pass what `times` says."""

    backend = "timed"
    dynamic = True
    max_length = _LENGTHS[-1]

    def __init__(self, times: PassTimes) -> None:
        self.times = times

    def __call__(self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        return self.run_all([Text(ids, types)])[0].logits

    def run_all(self, texts: Sequence[Text], *, importance: bool = False) -> list[Output]:
        seconds = self.times.packed_s([len(text.ids) for text in texts])
        return [Output(_slept(seconds), None)] * len(texts)


class _Packed(Loaded):
    resident = True
    memory = None


class _HopReplica(EncoderReplica):
    def runtimes(self, config: EncoderConfig) -> Runtimes:
        return Loaded(config, lambda max_length: _StaticRuntime(max_length, 0.0))


class _OneLengthReplica(EncoderReplica):
    def runtimes(self, config: EncoderConfig) -> Runtimes:
        return Loaded(config, lambda max_length: _StaticRuntime(max_length, _static_s(max_length)))


class _PackedReplica(EncoderReplica):
    def runtimes(self, config: EncoderConfig) -> Runtimes:
        times = _passes(config.model)
        return _Packed(config, lambda _max_length: _PackedRuntime(times))


def _static_s(max_length: int) -> float:
    """On a static runtime of the paper's base model, stretched."""
    return BASE.static_s(max_length) * _MEAN_S / BASE.mean_static_s(tweet_lengths())


@cache
def _passes(model: str) -> PassTimes:
    """Of the packed runtime of `model` as measured on this machine, stretched."""
    times = timed_runtime.load(sources.fetch(model), _LENGTHS[-1]).times
    assert times
    alone_s = np.interp(tweet_lengths(), times.lengths, times.seconds[0])
    table = np.array(times.seconds) * (_MEAN_S / float(alone_s.mean()))
    return times.model_copy(update={"seconds": tuple(map(tuple, table.tolist()))})


class _Case(ABC):
    """A service of the live cluster, and the simulator's view of it."""

    name: str
    load: float
    """Of the replicas' time, were each request computed by itself."""

    @abstractmethod
    def simulation(self, model: str, service: Service) -> Simulation | BatchedSimulation: ...


class _AsServed(_Case):
    name = "packed"
    load = 0.65

    def simulation(self, model: str, service: Service) -> BatchedSimulation:
        planner = Planner(_LENGTHS[-1], _SLO_S, residency=Residency(dict.fromkeys(_LENGTHS, 0.0), 0.0))
        homes = even_plan(_LENGTHS, _REPLICAS)
        return packed_simulation(_passes(model), homes, _LENGTHS[-1], service, [Planned(planner, _LENGTHS)])


class _OneLength(_Case):
    name = "one_length"
    load = 0.6

    def simulation(self, model: str, service: Service) -> Simulation:
        fleet = static_fleet(_SLO_S, even_plan(_LENGTHS, _REPLICAS), {length: _static_s(length) for length in _LENGTHS})
        return Simulation(fleet, service, [Planned(Planner(_LENGTHS[-1], _SLO_S), _LENGTHS)])


_CASES = (_AsServed(), _OneLength())


@dataclass(frozen=True)
class _Run:
    """What was sent to the live cluster, by second from the first, and how long each took."""

    seconds: Floats
    tokens: Integers
    latencies: Floats
    ratios: Floats
    """What each one's pass took over what it should."""
    hops_s: Floats
    """What requests to the service that answers at once took meanwhile."""


def application(model: str, cpus: float) -> Application:
    """The timed services, and the one that answers at once."""
    service = {"kind": "encoder", "model": model, "replicas": _REPLICAS, "lengths": _LENGTHS, "slo_ms": _SLO_S * 1e3}
    service["cpus"] = cpus
    one = {**service, "residency": "one"}
    services = {"packed": service, "one_length": one, _HOP: {**one, "lengths": _LENGTHS[-1:], "replicas": 1}}
    _passes(model)  # measured here, alone
    replicas = {"packed": _PackedReplica, "one_length": _OneLengthReplica, _HOP: _HopReplica}
    return assemble(parse({"gateway": {"cpus": cpus}, "services": services}), replicas)


async def figures(http: aiohttp.ClientSession, address: str, model: str, runs: int, seconds: int) -> list[Figure]:
    """The simulator's errors, relative to the live cluster, over several runs of the same length."""
    found = []
    for case in _CASES:
        errors, noise = [], []
        for seed in range(runs):
            run = await _live(http, address, case, _WARMUP_S + seconds, seed)
            errors.append(_errors(case, model, run))
            noise.append(f"{np.median(run.hops_s) * 1e3:.1f} ms and {np.median(run.ratios) - 1:+.1%}")
        means, tails = zip(*errors, strict=True)
        suffix = "" if case is _CASES[0] else f"_{case.name}"
        beside = f"{_REPLICAS} replicas, {runs} x {seconds} s; hops and passes took {', '.join(noise)} more"
        found.append(median(f"simulator_error_mean{suffix}", means, "<= 0.05", beside))
        found.append(median(f"simulator_error_p98{suffix}", tails, "<= 0.1", "of the same requests"))
    return found


async def _live(http: aiohttp.ClientSession, address: str, case: _Case, seconds: int, seed: int) -> _Run:
    rng = np.random.default_rng(seed)
    rate = case.load * _REPLICAS / _MEAN_S
    times = np.cumsum(rng.exponential(1 / rate, round(rate * seconds)))
    lengths = rng.choice(tweet_lengths(), len(times))
    sent, latencies, ratios = (np.zeros(len(times)) for _ in range(3))
    started = time.perf_counter()
    hops_s: list[float] = []

    async def request(index: int) -> None:
        await asyncio.sleep(started + times[index] - time.perf_counter())
        sent[index] = time.perf_counter() - started
        latencies[index], ratios[index] = await _send(http, address, case.name, int(lengths[index]))

    async def look() -> None:
        while True:
            hops_s.append((await _send(http, address, _HOP, int(rng.choice(lengths))))[0])
            await asyncio.sleep(_HOP_EVERY_S)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(request(index) for index in range(len(times))))
    looking.cancel()
    order = np.argsort(sent, kind="stable")
    return _Run(sent[order], lengths[order], latencies[order], ratios[order], np.array(hops_s))


async def _send(http: aiohttp.ClientSession, address: str, service: str, tokens: int) -> tuple[float, float]:
    """The seconds until the answer, and what its pass took over what it should."""
    parameters = {"top_k": 1, "slo_ms": 600_000, "function_to_apply": "none"}
    body = {"inputs": _WORD * max(1, tokens - _SPECIAL), "parameters": parameters}
    started = time.perf_counter()
    async with http.post(f"{address}/models/{service}", data=json.dumps(body)) as response:
        answer = await response.text()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer}")
    return time.perf_counter() - started, json.loads(answer)[0][0]["score"]


def _errors(case: _Case, model: str, run: _Run) -> tuple[float, float]:
    """|simulated / live - 1| of the mean and of P98, past the warm-up."""
    service = Service(_SLO_S, variation=tuple(run.ratios.tolist()), hops_s=tuple(run.hops_s.tolist()))
    stream = Recorded(run.seconds, np.maximum(run.tokens, _SPECIAL + 1))
    outcome = case.simulation(model, service).run(stream, warmup=_WARMUP_S)
    live = run.latencies[run.seconds >= _WARMUP_S]
    mean, tail = float(live.mean()), float(np.quantile(live, 0.98))
    return abs(outcome.latencies.mean / mean - 1), abs(outcome.latencies.quantile(0.98) / tail - 1)
