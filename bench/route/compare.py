"""The default cluster's route on questions that nobody has learned: who is found, how well that one answers, and what
it costs to find it.

Against one adapter for all questions, the best there is, and against naming the right one oneself.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import yaml
from rich.progress import track
from tokenizers import Tokenizer
from torch.nn import functional

from pliant import zoo
from pliant.bench.cluster import cluster
from pliant.bench.load import closed_loop, session
from pliant.bench.report import Figure, Options, Report, ratio
from pliant.deployments.app import build
from pliant.models import sources
from pliant.torchvision_ops import declare
from pliant.zoo import corpus, docstrings, library, shapes
from pliant.zoo.shapes import ASSISTANT, BEGIN, END, USER

declare()
from peft import PeftModel  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

_ROUTE, _OTHERWISE = "ask", "chat"
_TO = {shape.part: name for name, shape in shapes.ADAPTERS.items()} | {library.LANGUAGE: _OTHERWISE}
"""Who has read about it, by label."""
_SLO_MS = 60_000
"""Which no machine misses: what is measured is who is found, not who is in time."""
_LANGUAGE_CHARACTERS = 200
"""Of a paragraph, which is sent like a question."""
_CLIENTS = 4
_LOOK_S = 0.2


@dataclass(frozen=True)
class _Plan:
    repetitions: int
    requests: int
    """In each block."""
    tokens: int = 24
    seed: int = 0


_QUICK = _Plan(repetitions=8, requests=40)
_FULL = _Plan(repetitions=20, requests=200)


def run(options: Options) -> Report:
    """Ours is the route."""
    plan = _QUICK if options.quick else _FULL
    texts = [text.text for text in library.questions()]
    asked = zip(_held_out(), texts, strict=True)
    paragraphs = [text.text for text in corpus.held_out() if len(text.text) <= _LANGUAGE_CHARACTERS]
    losses = _losses([(text, docstring.text) for docstring, text in asked])
    with cluster({"ours": build({"services": _services()})}) as address:
        _await_adapters(f"{address}/ours")
        found, kept, named, routed = asyncio.run(_ask(f"{address}/ours", texts, paragraphs, plan))
    right = [_TO[text.label] for text in library.questions()]
    perplexity = {
        "routed": _perplexity(losses[model][at] for at, model in enumerate(found)),
        "right": _perplexity(losses[model][at] for at, model in enumerate(right)),
        **{name: _perplexity(each) for name, each in losses.items()},
    }
    best = min(shapes.ADAPTERS, key=perplexity.__getitem__)
    return Report(
        [
            _share("route_questions_right", list(map(str.__eq__, found, right)), ">= 0.85"),
            _share("route_language_right", [model == _OTHERWISE for model in kept], ">= 0.95"),
            *(
                Figure(
                    name, value, value, value, target, f"{perplexity['routed']:.1f}, {other} {perplexity[other]:.1f}"
                )
                for name, other, target in (
                    ("route_perplexity_vs_best_for_all", best, "< 1"),
                    ("route_perplexity_vs_right_ones", "right", ""),
                )
                for value in (perplexity["routed"] / perplexity[other],)
            ),
            ratio("route_latency_vs_named", routed, named, "<= 1.25", _milliseconds(routed, named)),
        ],
        {**asdict(plan), "questions": len(texts), "paragraphs": len(paragraphs), "to": _TO, "perplexity": perplexity},
        {},
    )


def _held_out() -> Iterator[docstrings.Docstring]:
    """What the questions are about, in their order."""
    for part in docstrings.PARTS:
        yield from docstrings.held_out(part)


@torch.no_grad()
def _losses(conversations: Sequence[tuple[str, str]]) -> dict[str, list[tuple[float, int]]]:
    """By who answers, for each question: the cross entropy of the answer's tokens, summed, and how many they are."""
    folder, adapters = sources.fetch(f"zoo/{shapes.BASE}"), sources.fetch_adapters(f"zoo/{zoo.ADAPTERS}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    read = [[tokenizer.encode(text, add_special_tokens=False).ids for text in pair] for pair in conversations]
    found: dict[str, list[tuple[float, int]]] = {}
    for name in (_OTHERWISE, *shapes.ADAPTERS):
        model: Any = LlamaForCausalLM.from_pretrained(folder)
        if name != _OTHERWISE:
            model = PeftModel.from_pretrained(model, str(adapters / name))
        model.eval()
        found[name] = [_loss(model, question, answer) for question, answer in read]
    return found


def _loss(model: Any, question: Sequence[int], answer: Sequence[int]) -> tuple[float, int]:
    said = [*answer, END]
    ids = torch.tensor([[BEGIN, USER, *question, END, ASSISTANT, *said]])
    logits = model(input_ids=ids).logits[0, -len(said) - 1 : -1]
    return float(functional.cross_entropy(logits, ids[0, -len(said) :], reduction="sum")), len(said)


def _perplexity(losses: Iterable[tuple[float, int]]) -> float:
    sums, tokens = zip(*losses, strict=True)
    return math.exp(sum(sums) / sum(tokens))


def _services() -> dict[str, Any]:
    """Those of the default cluster, whatever the machine does beside."""
    content = yaml.safe_load((Path(__file__).resolve().parents[2] / "cluster.yaml").read_text())
    services = content["applications"][0]["args"]["services"]
    slow = {"library": {"slo_ms": _SLO_MS}, _OTHERWISE: {"slo_ms": _SLO_MS}, _ROUTE: {"slo_ms": _SLO_MS}}
    return {name: {**services[name], **changes} for name, changes in slow.items()}


def _await_adapters(address: str) -> None:
    """They are registered once the planner has looked at them."""
    while httpx.get(f"{address}/stats", timeout=60).json()["services"][_OTHERWISE]["adapters"] < len(shapes.ADAPTERS):
        time.sleep(_LOOK_S)


async def _ask(
    address: str, questions: Sequence[str], paragraphs: Sequence[str], plan: _Plan
) -> tuple[list[str], list[str], list[float], list[float]]:
    """Who answers the questions, and the paragraphs; and median seconds by block, of who is named and by the route."""
    url, rng = f"{address}/v1/chat/completions", random.Random(plan.seed)
    async with session() as http:
        models = await closed_loop(http, url, [_body(_ROUTE, text, 1) for text in questions], _CLIENTS)
        kept = await closed_loop(http, url, [_body(_ROUTE, text, 1) for text in paragraphs], _CLIENTS)
        found = [answer["model"] for answer in models.answers]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in track(range(plan.repetitions), "route", transient=True):
            chosen = rng.choices(range(len(questions)), k=plan.requests)
            for routed in rng.sample((False, True), 2):
                bodies = [_body(_ROUTE if routed else found[at], questions[at], plan.tokens) for at in chosen]
                seconds[routed].append(float(np.median((await closed_loop(http, url, bodies, 1)).latencies)))
    return found, [answer["model"] for answer in kept.answers], seconds[False], seconds[True]


def _body(model: str, text: str, tokens: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(body).encode()


def _share(name: str, right: Sequence[bool], target: str) -> Figure:
    share = sum(right) / len(right)
    return Figure(name, share, share, share, target, f"{sum(right)} of {len(right)}")


def _milliseconds(routed: Sequence[float], named: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(routed):.3g} ms, named {1e3 * statistics.median(named):.3g} ms"
