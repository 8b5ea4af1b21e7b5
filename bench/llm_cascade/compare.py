"""A cascade of two language models that go on with answers about Python: what it saves of the large one's tokens, how
many answers it spoils, and how long it takes.

Both models have read the answers; the small one remembers less. What it may answer is chosen at some places in them and
counted at others.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.progress import track

from pliant.bench.cluster import cluster
from pliant.bench.load import closed_loop, session
from pliant.bench.report import Options, Report, median, ratio
from pliant.cache import cache_folder, made_once
from pliant.deployments.app import build
from pliant.training.labelled_prompts import LabelledPrompt
from pliant.zoo import llama, shapes
from pliant.zoo.documents import conversations
from pliant.zoo.llama import SPECIAL
from pliant.zoo.shapes import ASSISTANT, END, USER, LlamaShape

_SHAPE = LlamaShape(layers=2, hidden=192, heads=4, kv_heads=2, intermediate=512, steps=330, learning_rate=4e-3)
"""Of the small model."""
_SMALL, _LARGE, _BOTH = "small", "large", "both"
_TOKENS = 12
"""Of each answer."""
_RIGHT = 3
"""Words of the text with which an answer must go on to be right."""
_LOSS = 0.01
_SLO_MS = 60_000
"""Which no machine misses: what is measured is not whether answers are in time."""
_CLIENTS = 4
_LOOK_S = 0.2


@dataclass(frozen=True)
class _Plan:
    chosen_on: int
    counted_on: int
    repetitions: int
    requests: int
    """In each block."""
    seed: int = 0


_QUICK = _Plan(chosen_on=2000, counted_on=1000, repetitions=8, requests=40)
_FULL = _Plan(chosen_on=2000, counted_on=3000, repetitions=20, requests=100)


def run(options: Options) -> Report:
    """Ours is the cascade."""
    plan = _QUICK if options.quick else _FULL
    asked = _prompts(plan.chosen_on + plan.counted_on, plan.seed)
    chosen_on, counted_on = asked[: plan.chosen_on], asked[plan.chosen_on :]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("\n".join(json.dumps({"prompt": one.text, "answer": one.answer}) for one in chosen_on))
        with cluster({"ours": build({"services": _services(data)})}) as address:
            view = _chosen(f"{address}/ours")
            answers = asyncio.run(_answers(f"{address}/ours", counted_on))
            seconds = asyncio.run(_seconds(f"{address}/ours", counted_on, plan))
    said = {name: [answer["choices"][0]["text"] for answer in each] for name, each in answers.items()}
    right = {name: [one.right(text) for one, text in zip(counted_on, each, strict=True)] for name, each in said.items()}
    worse = [large and not both for large, both in zip(right[_LARGE], right[_BOTH], strict=True)]
    tokens = [answer["usage"]["completion_tokens"] for answer in answers[_LARGE]]
    early = [answer["model"] == _SMALL for answer in answers[_BOTH]]
    saved = sum(count for count, small in zip(tokens, early, strict=True) if small) / sum(tokens)
    accuracy = ", ".join(f"{name} {statistics.mean(each):.1%} right" for name, each in right.items())
    return Report(
        [
            median("llm_cascade_tokens_saved", [saved], "", f"{statistics.mean(early):.0%} of {len(early)} answers"),
            median("llm_cascade_loss", [statistics.mean(worse)], f"<= {_LOSS}", accuracy),
            ratio("llm_cascade_latency_vs_large", seconds[_BOTH], seconds[_LARGE], "", "mean of an answer"),
            ratio("llm_cascade_latency_small_vs_large", seconds[_SMALL], seconds[_LARGE], "", "mean of an answer"),
        ],
        {**asdict(plan), "shape": asdict(_SHAPE), "tokens": _TOKENS, "loss": _LOSS, "chosen": view["chosen"]},
        {},
    )


def _prompts(count: int, seed: int) -> list[LabelledPrompt]:
    """Questions, each with a beginning of its answer; no two are the same."""
    given = [(question, answer.split()) for question, answer in conversations()]
    places = [(question, answer, at) for question, answer in given for at in range(len(answer) - _RIGHT)]
    drawn = random.Random(seed).sample(places, count)
    return [
        LabelledPrompt(
            f"{SPECIAL[USER]}{question}{SPECIAL[END]}{SPECIAL[ASSISTANT]}{' '.join(answer[:at])}",
            None,
            " ".join(answer[at : at + _RIGHT]),
        )
        for question, answer, at in drawn
    ]


def _services(data: Path) -> dict[str, Any]:
    folder = cache_folder() / "bench" / f"small-llama-{_SHAPE.layers}-{_SHAPE.hidden}-{_SHAPE.steps}"
    made_once(folder, _train)
    served = {"kind": "llm", "memory_mb": 128, "max_length": 512, "slo_ms": _SLO_MS, "cpus": 0.05}
    return {
        _SMALL: {**served, "model": str(folder)},
        _LARGE: {**served, "model": f"zoo/{shapes.BASE}"},
        _BOTH: {
            "kind": "llm-cascade",
            "levels": [_SMALL, _LARGE],
            "data": str(data),
            "loss": _LOSS,
            "answer_tokens": _TOKENS,
            "slo_ms": _SLO_MS,
        },
    }


def _train(into: Path) -> None:
    llama.train(_SHAPE, into, lambda _what, _done: None)


def _chosen(address: str) -> dict[str, Any]:
    """What /stats says of the cascade once it has measured its models."""
    while True:
        view: dict[str, Any] = httpx.get(f"{address}/stats", timeout=60).json()["services"][_BOTH]
        if view["chosen"]:
            return view
        time.sleep(_LOOK_S)


async def _answers(address: str, asked: Sequence[LabelledPrompt]) -> dict[str, list[dict[str, Any]]]:
    """By model, to all questions."""
    async with session() as http:
        return {
            name: (
                await closed_loop(http, f"{address}/v1/completions", [_body(name, one) for one in asked], _CLIENTS)
            ).answers
            for name in (_SMALL, _LARGE, _BOTH)
        }


async def _seconds(address: str, asked: Sequence[LabelledPrompt], plan: _Plan) -> dict[str, list[float]]:
    """By model, the mean of each block, of one client."""
    url, rng = f"{address}/v1/completions", random.Random(plan.seed)
    seconds: dict[str, list[float]] = {_SMALL: [], _LARGE: [], _BOTH: []}
    async with session() as http:
        for _ in track(range(plan.repetitions), "llm-cascade", transient=True):
            chosen = rng.sample(list(asked), plan.requests)
            for name in rng.sample(list(seconds), len(seconds)):
                block = await closed_loop(http, url, [_body(name, one) for one in chosen], 1)
                seconds[name].append(float(np.mean(block.latencies)))
    return seconds


def _body(model: str, one: LabelledPrompt) -> bytes:
    return json.dumps({"model": model, "prompt": one.text, "max_tokens": _TOKENS, "temperature": 0}).encode()
