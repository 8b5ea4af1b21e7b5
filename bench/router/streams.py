"""What clients of language models wait between two pieces of a stream when a gateway has few of them, and many."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import numpy as np
from ray.serve import Application
from tokenizers import Tokenizer

from pliant.bench.load import LoadError
from pliant.bench.pretended import PretendedExecutor
from pliant.config.llm import LlmConfig
from pliant.deployments.app import assemble
from pliant.deployments.kinds import parse
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.replica import LlmReplica
from pliant.models import sources

FEW, MANY = 32, 256
"""Streams at a time."""
_SERVICE = "chat"
_STEP_S = 0.1
"""Of the model, however many answers it computes."""
_TOKEN = 70
_LENGTH = 512


class PacedReplica(LlmReplica):
    """Our replica, around a model that only lets time pass."""

    def engine(self, config: LlmConfig) -> Engine:
        tokenizer = Tokenizer.from_file(str(sources.fetch(config.model) / "tokenizer.json"))
        executor = PretendedExecutor(MANY, _LENGTH, time.sleep, _STEP_S, token=_TOKEN)
        engine = Engine(executor, tokenizer, (), MANY, 1.0)
        engine.rehearse()
        return engine


def paced(model: str, cpus: float) -> Application:
    """One gateway in front of one replica, whose steps all take the same time; its tokenizer is that of `model`."""
    service = {"kind": "llm", "model": model, "slots": MANY, "max_length": _LENGTH, "replicas": 1, "cpus": cpus}
    config = parse({"gateway": {"cpus": cpus}, "services": {_SERVICE: service}})
    return assemble(config, {_SERVICE: PacedReplica})


async def tpot_p99(http: aiohttp.ClientSession, address: str, streams: int, tokens: int) -> float:
    """The 99th percentile of the seconds between two pieces, over `streams` of so many tokens each, begun at once.

    Raises LoadError unless all are answered whole.
    """
    gaps = await asyncio.gather(*(_gaps(http, f"{address}/v1/completions", tokens) for _ in range(streams)))
    return float(np.percentile(np.concatenate(gaps), 99))


async def _gaps(http: aiohttp.ClientSession, url: str, tokens: int) -> list[float]:
    body = {"model": _SERVICE, "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    times: list[float] = []
    ended = False
    async with http.post(url, json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                ended = line.startswith(b"data: [DONE]")
                if not ended and "error" in json.loads(line[6:]):
                    raise LoadError(line.decode())
                times.append(time.perf_counter())
    if response.status != 200 or not ended:
        raise LoadError(f"a stream answered {response.status} and ended early")
    return np.diff(times[:-1]).tolist()
