"""Ours, live, against padding, which is where Arlo's claim begins (§2), and against runs at the exact length.

All services of one cluster hold the same model, each on as many replicas, behind one gateway. They answer the same
texts in turn, and must agree on every label. At many clients texts as long as tweets are answered in batches.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import aiohttp
import numpy as np
from ray.serve import Application
from rich.progress import track
from tokenizers import Tokenizer

from pliant.bench import workloads
from pliant.bench.cluster import cluster
from pliant.bench.encoder.baselines import (
    BATCH,
    BatchedOnnxReplica,
    EagerReplica,
    OnnxReplica,
    export,
    onnxruntime_runs_on,
)
from pliant.bench.encoder.litserve_peer import Server, servers
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
_MANY = 32
"""Clients that send tweets at once."""
_REPLICAS_OF_EACH = 2
_SETTLE_S = 20
RESERVED = 0.02
"""Of a CPU, and of a GPU, that each replica reserves: all run on whatever the machine has."""
_REPLICAS: dict[str, type[EncoderReplica]] = {
    "ours": EncoderReplica,
    "padded": EncoderReplica,
    "exact_eager": EagerReplica,
    "onnxruntime": OnnxReplica,
    "onnxruntime_batched": BatchedOnnxReplica,
}
"""Service -> what its replicas are; "padded" is ours, with one length for all texts."""
_OURS = "ours"
_ONE_BY_ONE = ("padded", "exact_eager", "onnxruntime")
_TARGETS = {"padded": "<= 0.35", "exact_eager": "<= 0.85", "onnxruntime": "<= 1.0"}


@dataclass(frozen=True)
class _Plan:
    repetitions: int
    texts: int
    """Of each repetition, drawn anew."""
    tweets: int = 320
    seed: int = 0


_QUICK = _Plan(repetitions=6, texts=40)
_FULL = _Plan(repetitions=25, texts=160)


def compare(options: Options) -> Report:
    """Ours against padding to 512, transformers at the exact length, and ONNX Runtime at the exact length, which at
    many clients computes batches, too."""
    plan = _QUICK if options.quick else _FULL
    services = [name for name in _REPLICAS if "onnxruntime" not in name or onnxruntime_runs_on(options.device)]
    texts = workloads.texts(options.data, random.Random(plan.seed))
    folder = sources.fetch(MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lengths = _token_counts(tokenizer, texts)
    tweets = workloads.tweets(options.data, tokenizer, plan.tweets, random.Random(plan.seed))
    peers: AbstractContextManager[dict[str, Server]] = nullcontext({})
    if "onnxruntime" in services:
        export(folder, _LONGEST)
        peers = servers(MODEL, export(folder, _LONGEST, BATCH), _REPLICAS_OF_EACH)
    gpus = int(options.device == "cuda")
    with cluster({"bench": _application(services, gpus)}, gpus) as address:
        one_by_one = [name for name in services if name in (_OURS, *_ONE_BY_ONE)]
        drawn, blocks, computed = asyncio.run(_measure(address, one_by_one, texts, plan))
        together = [name for name in services if name in (_OURS, "onnxruntime_batched")]
        urls = {name: f"{address}/bench/models/{name}" for name in together}
        with peers as litserve:
            throughputs = asyncio.run(_throughputs(urls, litserve, tweets, plan))
    sent = np.array([lengths[index] for draw in drawn for index in draw])
    figures = [figure for clients in _CLIENTS for figure in _ratios(blocks, clients)]
    if len(throughputs) > 1:
        ours = throughputs.pop(_OURS)
        batched = throughputs.pop("onnxruntime_batched")
        choice, best = max(throughputs.items(), key=lambda each: float(np.median(each[1])))
        for name, theirs, how in (("onnxruntime_batched", batched, ""), ("litserve", best, f"; {choice}")):
            beside = f"{np.median(ours):.3g} against {np.median(theirs):.3g} tweets/s, {_MANY} clients{how}"
            figures.append(ratio(f"throughput_vs_{name}", ours, theirs, ">= 1.2", beside))
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


def _application(services: Sequence[str], gpus: int) -> Application:
    """One gateway, and for each service as many replicas."""
    pool = {"kind": "encoder", "model": MODEL, "replicas": _REPLICAS_OF_EACH, "slo_ms": _SLO_MS, "truncate": True}
    share = {"cpus": RESERVED, "gpus": gpus * RESERVED}
    config = parse(
        {
            "gateway": {"cpus": RESERVED},
            "services": {
                name: {**pool, **share, **({} if name == _OURS else {"lengths": [_LONGEST], "residency": "one"})}
                for name in services
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


async def _throughputs(
    ours: Mapping[str, str], peers: Mapping[str, Server], tweets: Sequence[str], plan: _Plan
) -> dict[str, list[float]]:
    """Texts per second at each of the URLs that are `ours`, and of the peers', in each repetition."""
    parameters = {"slo_ms": _NEVER_LATE_MS, "top_k": 1}
    bodies = [json.dumps({"inputs": tweet, "parameters": parameters}).encode() for tweet in tweets]
    rng = random.Random(plan.seed)
    names = [*ours, *peers]
    found: dict[str, list[float]] = {name: [] for name in names}

    async def block(name: str, chosen: Sequence[bytes]) -> Block:
        """With connections of its own: a server that stood still closes those that it had."""
        url = peers[name].url if name in peers else ours[name]
        with peers[name].awake() if name in peers else nullcontext():
            async with session() as http:
                return await closed_loop(http, url, chosen, _MANY)

    for name in names:
        await block(name, bodies[:_MANY])
    for _ in track(range(plan.repetitions), "tweets", transient=True):
        blocks = {name: await block(name, bodies) for name in rng.sample(names, len(names))}
        for name, each in blocks.items():
            found[name].append(each.throughput)
        _agree(blocks, tweets)
    return found


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
            _TARGETS.get(name, "") if clients == 1 else "",
            f"{np.median(means[_OURS]) * 1e3:.3g} against {np.median(means[name]) * 1e3:.3g} ms, {clients} client(s)",
        )
        for name in blocks
        if name != _OURS
    ]
