"""Three services on one GPU behind Ray Serve: how soon they are ready, how fast clients are answered, and whether
answers outlive a replica that dies.

Wants Ray and whatever else pliant is installed with: on a bare image, what `bundle` brings along.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pliant.bench.gpu import saved
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale

_MODEL = "8B"


class Services(NamedTuple):
    """Their names."""

    texts: str = "sentiment"
    images: str = "images"
    chat: str = "chat"


@dataclass(frozen=True)
class Work:
    """What is sent. Streams have prompts of so many words, a token for each byte of them, and `answer` tokens."""

    texts: int
    images: int
    side: int
    prompt: int
    answer: int
    streams: tuple[int, ...]
    """At once."""


_WORK = Work(texts=2000, images=500, side=224, prompt=100, answer=64, streams=(1, 8, 32))
_DRY = Work(texts=8, images=4, side=64, prompt=8, answer=4, streams=(1, 2))


@dataclass(frozen=True)
class Stream:
    """Seconds from the request to the first token, and of each token after it."""

    first_s: float
    token_s: float
    tokens: int


def run(record: Record, scale: Scale) -> None:
    """On CPUs, if there is no GPU, with tiny models."""
    with record.part("serving"):
        from pliant.bench.cluster import cluster
        from pliant.deployments.app import build

        work = _DRY if scale.dry else _WORK
        args = {"gateway": {"cpus": 0.2}, "services": _services(scale)}
        begun = time.perf_counter()
        with cluster({"pliant": build(args)}, torch.cuda.device_count()) as address:
            record.figures["ready_s"] = time.perf_counter() - begun
            record.save()
            asyncio.run(measure(record, f"{address}/pliant", work, Services()))
            asyncio.run(lose_a_replica(record, f"{address}/pliant", work))


def _services(scale: Scale) -> dict[str, dict[str, Any]]:
    """Two replicas of the language model, one of each other; shares of one GPU, or none."""

    def shared(gpus: float) -> dict[str, Any]:
        return {"cpus": 0.2, "dtype": scale.dtype_name, "gpus": gpus if scale.device.type == "cuda" else 0}

    name = "1B" if scale.dry else _MODEL
    chat = {"kind": "llm", "model": str(saved.decoder(name, scale)), "replicas": 2, "slots": 32, "max_length": 1024}
    texts = {"kind": "encoder", "model": str(saved.classifier("BERT-base", scale.dry)), "lengths": "auto"}
    images = {"kind": "vision", "model": str(saved.vision_transformer(scale.dry))}
    names = Services()
    return {
        names.texts: {**texts, "replicas": 1, "slo_ms": 1000, **shared(0.1)},
        names.images: {**images, "replicas": 1, **shared(0.1)},
        names.chat: {**chat, **shared(0.35)},
    }


async def measure(record: Record, address: str, work: Work, services: Services) -> None:
    """Each of the `services` by itself. Raises LoadError unless all are answered."""
    from pliant.bench.images import base64_png
    from pliant.bench.load import Block, closed_loop, session

    def note(name: str, block: Block) -> None:
        milliseconds = {f"p{q}_ms": float(np.percentile(block.latencies, q)) * 1e3 for q in (50, 99)}
        record.tables[name] = {"answers_per_s": block.throughput, **milliseconds}
        record.save()

    text = json.dumps({"inputs": "w1 w2 w3 w4 w5 w6 w7 w8"}).encode()
    pixels = np.random.default_rng(0).integers(0, 256, (work.side, work.side, 3), np.uint8)
    image = json.dumps({"inputs": base64_png(pixels)}).encode()
    sent = {"texts": (services.texts, text, work.texts), "images": (services.images, image, work.images)}
    async with session() as http:
        for kind, (name, body, count) in sent.items():
            for clients in (1, 16):
                some = [body] * max(1, count * clients // 16)
                note(f"{kind}, {clients} at once", await closed_loop(http, f"{address}/models/{name}", some, clients))
            record.figures[f"{kind}_per_s"] = record.tables[f"{kind}, 16 at once"]["answers_per_s"]
        for count in work.streams:
            begun = time.perf_counter()
            streams = (_stream(http, address, services.chat, work, number) for number in range(count))
            found = await asyncio.gather(*streams)
            tokens_per_s = sum(one.tokens for one in found) / (time.perf_counter() - begun)
            record.tables[f"chat, {count} at once"] = {**_medians(found), "tokens_per_s": tokens_per_s}
            record.save()
        record.figures["tokens_per_s"] = tokens_per_s


async def lose_a_replica(record: Record, address: str, work: Work) -> None:
    """Kill one of the language model's amid as many answers as there are at most; counts those that broke off."""
    import psutil

    from pliant.bench.load import LoadError, session
    from pliant.bench.start.processes import command, kind

    chat = Services().chat
    processes = psutil.Process().children(recursive=True)
    replicas = [process for process in processes if kind(command(process)) == f"replicas of {chat}"]
    async with session() as http:
        streams = (_stream(http, address, chat, work, number) for number in range(max(work.streams)))
        answers = [asyncio.create_task(stream) for stream in streams]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=work.answer * 2e-3)
        replicas[0].kill()
        found = await asyncio.gather(*answers, return_exceptions=True)
    broken = [one for one in found if isinstance(one, BaseException)]
    record.figures["streams_of_a_killed_replica_broken"] = len(broken)
    record.tables["killed replica"] = {"streams": len(found), "broken": [repr(one) for one in broken[:3]]}
    if unexpected := [one for one in broken if not isinstance(one, LoadError)]:
        raise unexpected[0]


async def _stream(http: Any, address: str, service: str, work: Work, number: int) -> Stream:
    """Raises LoadError unless the answer comes whole."""
    from pliant.bench.load import LoadError

    words = " ".join(f"w{number + word}" for word in range(work.prompt))
    body = {"model": service, "prompt": words, "max_tokens": work.answer, "ignore_eos": True, "temperature": 0}
    usage: dict[str, int] = {}
    times: list[float] = []
    begun = time.perf_counter()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post(f"{address}/v1/completions", json=asked) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise LoadError(line.decode())
                times.append(time.perf_counter())
                usage = piece.get("usage") or usage
    tokens = usage.get("completion_tokens", 0)
    if response.status != 200 or tokens != work.answer:
        raise LoadError(f"a stream answered {response.status} and {tokens} of {work.answer} tokens")
    return Stream(times[0] - begun, (times[-1] - times[0]) / max(1, tokens - 1), tokens)


def _medians(streams: Sequence[Stream]) -> dict[str, float]:
    """In milliseconds."""
    rows = [asdict(stream) for stream in streams]
    return {f"{name}_ms": float(np.median([row[f"{name}_s"] for row in rows])) * 1e3 for name in ("first", "token")}
