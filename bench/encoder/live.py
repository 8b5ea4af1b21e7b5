"""Arlo's claim, live: runtimes compiled per length against padding, and against runs at the exact length (Arlo §2).

Four services of one cluster hold the same model, each on as many replicas, behind one gateway. They answer the same
texts in turn, and must agree on every label.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import aiohttp
import numpy as np
from ray.serve import Application
from rich.progress import track
from tokenizers import Tokenizer

from pliant.bench import workloads
from pliant.bench.cluster import cluster
from pliant.bench.encoder.baselines import EagerReplica, OnnxReplica, export, onnxruntime_runs_on
from pliant.bench.encoder.plots import Blocks, latency_against_length, latency_cdf
from pliant.bench.load import Block, LoadError, closed_loop, session
from pliant.bench.report import Figure, Options, Report, median, ratio
from pliant.deployments.app import assemble
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.kinds import parse
from pliant.models import sources

MODEL = "zoo/topics-large"
_LONGEST = 512
_SLO_MS = 1_000
_NEVER_LATE_MS = 100_000
_CLIENTS = (1, 4)
_SETTLE_S = 20
RESERVED = 0.02
"""Of a CPU, and of a GPU, that each replica reserves: all run on whatever the machine has."""
_REPLICAS: dict[str, type[EncoderReplica]] = {
    "compiled": EncoderReplica,
    "padded": EncoderReplica,
    "exact_eager": EagerReplica,
    "onnxruntime": OnnxReplica,
}
"""Service -> what its replicas are; "compiled" is ours."""
_OURS = "compiled"


@dataclass(frozen=True)
class _Plan:
    lengths: tuple[int, ...]
    repetitions: int
    texts: int
    """Of each repetition, drawn anew."""
    seed: int = 0


_QUICK = _Plan(lengths=(64, 128, 256, _LONGEST), repetitions=6, texts=40)
_FULL = _Plan(lengths=(32, 64, 96, 128, 256, _LONGEST), repetitions=25, texts=160)


def compare(options: Options) -> Report:
    """Ours against padding to 512, transformers at the exact length, and ONNX Runtime at the exact length."""
    plan = _QUICK if options.quick else _FULL
    services = [name for name in _REPLICAS if name != "onnxruntime" or onnxruntime_runs_on(options.device)]
    texts = workloads.texts(options.data, random.Random(plan.seed))
    folder = sources.fetch(MODEL)
    lengths = _token_counts(Tokenizer.from_file(str(folder / "tokenizer.json")), texts)
    if "onnxruntime" in services:
        export(folder, _LONGEST)
    gpus = int(options.device == "cuda")
    with cluster({"bench": _application(services, plan, gpus)}, gpus) as address:
        drawn, blocks, computed = asyncio.run(_measure(address, services, texts, plan))
    sent = np.array([lengths[index] for draw in drawn for index in draw])
    figures = [figure for clients in _CLIENTS for figure in _ratios(blocks, clients)]
    tokens = len(_CLIENTS) * int(sent.sum())
    waste = {name: 1 - tokens / computed[name] for name in (_OURS, "padded")}
    beside = f"of the tokens that were computed; padded to {_LONGEST}: {waste['padded']:.3g}"
    figures.append(median("padding_waste", [waste[_OURS]], beside=beside))
    quantiles = {f"p{percent}": int(np.percentile(sent, percent)) for percent in (5, 50, 95, 100)}
    config = {**asdict(plan), "model": MODEL, "services": services, "device": options.device, "tokens": quantiles}
    plots = {"cdf": latency_cdf(blocks), "length": latency_against_length(blocks, sent)}
    return Report(figures, config, plots)


def _token_counts(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Tokens of each text, special ones included, at most 512."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LONGEST)
    return np.array([len(encoding) for encoding in tokenizer.encode_batch(list(texts))])


def _application(services: Sequence[str], plan: _Plan, gpus: int) -> Application:
    """One gateway, and for each service as many replicas as ours has lengths."""
    pool = {"kind": "encoder", "model": MODEL, "replicas": len(plan.lengths), "slo_ms": _SLO_MS, "truncate": True}
    share = {"cpus": RESERVED, "gpus": gpus * RESERVED}
    config = parse(
        {
            "gateway": {"cpus": RESERVED},
            "services": {
                name: {**pool, **share, "lengths": plan.lengths if name == _OURS else [_LONGEST]} for name in services
            },
        }
    )
    return assemble(config, _REPLICAS)


async def _measure(
    address: str, services: Sequence[str], texts: Sequence[str], plan: _Plan
) -> tuple[list[list[int]], Blocks, dict[str, int]]:
    """The texts drawn for each repetition, the blocks, and the tokens that each service computed in them."""
    rng = random.Random(plan.seed)
    drawn = [rng.sample(range(len(texts)), plan.texts) for _ in range(plan.repetitions)]
    blocks: Blocks = {name: {clients: [] for clients in _CLIENTS} for name in services}
    async with session() as http:

        async def block(name: str, chosen: Sequence[int], clients: int) -> Block:
            parameters = {"slo_ms": _NEVER_LATE_MS, "top_k": 1}
            bodies = [json.dumps({"inputs": texts[index], "parameters": parameters}).encode() for index in chosen]
            return await closed_loop(http, f"{address}/bench/models/{name}", bodies, clients)

        for name in services:
            await block(name, drawn[0], max(_CLIENTS))
        before = {name: await _computed(http, address, name, plan.texts) for name in services}
        for chosen in track(drawn, "encoder", transient=True):
            for clients in rng.sample(_CLIENTS, len(_CLIENTS)):
                for name in rng.sample(services, len(services)):
                    blocks[name][clients].append(await block(name, chosen, clients))
                _agree({name: blocks[name][clients][-1] for name in services}, [texts[index] for index in chosen])
        answered = plan.texts * (1 + len(_CLIENTS) * plan.repetitions)
        after = {name: await _computed(http, address, name, answered) for name in services}
    return drawn, blocks, {name: after[name] - before[name] for name in services}


async def _computed(http: aiohttp.ClientSession, address: str, service: str, answered: int) -> int:
    """Tokens that the service's replicas computed, padding included, once they report all `answered` texts."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        async with http.get(f"{address}/bench/stats") as response:
            replicas = (await response.json())["services"][service]["replicas"].values()
        if sum(replica["served"] for replica in replicas) == answered:
            return sum(replica["computed_tokens"] for replica in replicas)
        await asyncio.sleep(0.2)
    raise LoadError(f"the replicas of {service} did not report {answered} texts within {_SETTLE_S} s")


def _agree(blocks: Mapping[str, Block], texts: Sequence[str]) -> None:
    """Raise LoadError unless all services gave the same top label for each text."""
    for index, text in enumerate(texts):
        labels = {name: block.answers[index][0][0]["label"] for name, block in blocks.items()}
        if len(set(labels.values())) > 1:
            raise LoadError(f"the services disagree: {labels} for {text!r}")


def _ratios(blocks: Blocks, clients: int) -> list[Figure]:
    means = {name: [float(block.latencies.mean()) for block in blocks[name][clients]] for name in blocks}
    suffix = "" if clients == 1 else f"_c{clients}"
    return [
        ratio(
            f"mean_latency_vs_{name}{suffix}",
            means[_OURS],
            means[name],
            "<= 0.35" if name == "padded" and clients == 1 else "",
            f"{np.median(means[_OURS]) * 1e3:.3g} against {np.median(means[name]) * 1e3:.3g} ms, {clients} client(s)",
        )
        for name in blocks
        if name != _OURS
    ]
