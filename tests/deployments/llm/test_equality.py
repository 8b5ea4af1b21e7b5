"""Greedy requests of mixed lengths and arrivals are answered token for token as by transformers, and as by PEFT."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.decoders import FAMILIES, logits, save
from support.foretold import Foretold
from support.lora_adapters import KINDS, adapt
from support.scripted_executor import byte_tokenizer

from pliant.deployments.llm.adapter_loader import AdapterLoader, PeftFolders
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.host_tier import HostTier
from pliant.deployments.llm.request import Generation, Piece
from pliant.formats.adapter_info import AdapterRef, bytes_of, read_adapter
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.kv_pages import PAGE
from pliant.models.sources import describe_decoder
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REQUESTS = 92
"""For each family."""
LONGEST_PROMPT, LONGEST_ANSWER, VOCAB = 60, 30, 97


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    rng = random.Random(family)
    generations = [
        Generation(
            str(number),
            prompt=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, LONGEST_PROMPT))),
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            sampling=Sampling(temperature=0),
        )
        for number in range(REQUESTS)
    ]
    answers = serve(executor.load(tmp_path, slots=8), generations, rng)
    for generation in generations:
        answer = answers[generation.id]
        assert len(answer) == generation.max_tokens
        scores = logits(model, [*generation.prompt, *answer[:-1]])[len(generation.prompt) - 1 :]
        assert torch.equal(scores.argmax(-1), torch.tensor(answer)), generation


def serve(loaded: executor.Executor, generations: list[Generation], rng: random.Random) -> dict[str, list[int]]:
    """All answers, from an engine that checks itself."""
    engine = Engine(loaded, byte_tokenizer(), (), queue=len(generations), stall_s=0.002, debug=True)
    return drive(engine, generations, rng, at_once=len(generations))


def drive(engine: Engine, generations: list[Generation], rng: random.Random, at_once: int) -> dict[str, list[int]]:
    """All answers; requests come a few at a time, and prompts in chunks."""
    answers: dict[str, list[int]] = {generation.id: [] for generation in generations}
    coming = list(generations)
    open_ = 0
    while coming or engine.busy:
        for _ in range(min(rng.choice((0, 0, 1, 3)), len(coming), at_once - open_)):
            engine.add(coming.pop())
            open_ += 1
        for name, item in engine.step():
            assert isinstance(item, Piece), item
            answers[name] += item.tokens
            open_ -= item.finish is not None
    return answers


@pytest.mark.parametrize(("family", "order"), [("llama3", "multi_queue"), ("qwen2", "fifo")])
def test_with_many_adapters_answers_are_those_of_peft(family: str, order: str, tmp_path: Path) -> None:
    """Twelve adapters of six kinds, in an arena that holds about four, and 32 requests at once, some without one."""
    base = save(family, tmp_path)
    models: dict[AdapterRef | None, PreTrainedModel] = {None: base}
    shape = describe_decoder(tmp_path).shape
    for number, kind in enumerate([*KINDS] * 2):
        folder = tmp_path / f"adapter-{number}"
        model = adapt(family, kind, folder, seed=number)
        models[read_adapter(folder, shape).ref(folder.name)] = model
    rng = random.Random(family)
    generations = [
        Generation(
            str(number),
            prompt=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, LONGEST_PROMPT))),
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            sampling=Sampling(temperature=0),
            adapter=rng.choice(list(models)),
        )
        for number in range(REQUESTS)
    ]
    sizes = [bytes_of(ref.ranks, shape, 4) for ref in models if ref]
    arena_bytes = max(sizes) + sum(sizes) // 8 + 4 * shape.kv_bytes(shape.max_length, 4)
    loaded = executor.load(tmp_path, slots=32, arena_bytes=arena_bytes, most_rank=256)
    queues: Queues[Answer, AdapterRef] = Fifo() if order == "fifo" else MultiQueue(QueueClasses(1.0))
    cache: AdapterCache[AdapterRef] = AdapterCache()
    engine = Engine(
        *(loaded, byte_tokenizer(), (), len(generations), 0.002),
        debug=True,
        scheduler=Scheduler(queues, cache, loaded.arena_bytes, slots=loaded.slots),
        loader=AdapterLoader(PeftFolders(loaded, 4, 256), host=HostTier(sum(sizes))),
    )
    answers = drive(engine, generations, rng, at_once=32)
    engine.close()
    adapters = engine.report()["adapters"]
    assert len(adapters["resident"]) < 12 <= adapters["loads"], "each is asked for, and not all fit"
    assert adapters["host_hits"] == adapters["loads"] - len(sizes), "each is read once"
    assert adapters["evictions"]["memory"] == adapters["loads"] - len(adapters["resident"])
    for generation in generations:
        answer = answers[generation.id]
        assert len(answer) == generation.max_tokens
        scores = logits(models[generation.adapter], [*generation.prompt, *answer[:-1]])[len(generation.prompt) - 1 :]
        assert torch.equal(scores.argmax(-1), torch.tensor(answer)), generation


def test_in_every_mixture_answers_are_those_of_transformers_and_peft(tmp_path: Path) -> None:
    """Common system prompts, second turns, several answers to one prompt, adapters, answers that another replica began,
    and so little memory that requests make way: all at once, checked after every step."""
    family = "llama3"
    models: dict[AdapterRef | None, PreTrainedModel] = {None: save(family, tmp_path)}
    shape = describe_decoder(tmp_path).shape
    for number, kind in enumerate([*KINDS][:2]):
        folder = tmp_path / f"adapter-{number}"
        model = adapt(family, kind, folder, seed=number)
        models[read_adapter(folder, shape).ref(folder.name)] = model
    rng = random.Random(0)
    systems = [tuple(rng.randrange(VOCAB) for _ in range(66)) for _ in range(2)]
    largest = max(bytes_of(ref.ranks, shape, 4) for ref in models if ref)
    page = shape.kv_bytes(PAGE, 4)
    loaded = executor.load(tmp_path, slots=8, budget_bytes=largest + 8 * page, most_rank=256)
    assert loaded.arena_bytes < 8 * 2 * page, "not all slots can be filled"
    cache: AdapterCache[AdapterRef] = AdapterCache("joint")
    engine = Engine(
        *(loaded, byte_tokenizer(), (), 200, 0.002),
        debug=True,
        scheduler=Scheduler(MultiQueue(QueueClasses(1.0)), cache, loaded.arena_bytes, slots=loaded.slots),
        predictor=Foretold(1),
        loader=AdapterLoader(PeftFolders(loaded, 4, 256), host=HostTier(2 * largest)),
    )
    generations: list[Generation] = []
    for number in range(30):
        short = rng.random() < 0.4
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))
        prompt = prompt if short else (*rng.choice(systems), *prompt)
        wanted = Generation(
            str(number),
            prompt,
            rng.randint(60, 90) if short else rng.randint(2, 20),
            Sampling(temperature=0),
            adapter=rng.choice(list(models)),
        )
        generations += [wanted._replace(id=f"{number}-{choice}") for choice in range(rng.choice((1, 1, 2)))]
    answers = drive(engine, generations, rng, at_once=40)
    later = [
        wanted._replace(id=f"{wanted.id} again", prompt=(*wanted.prompt, *answers[wanted.id], 5), max_tokens=3)
        for wanted in generations
        if len(wanted.prompt) + len(answers[wanted.id]) < 90
    ]
    moved = [
        wanted._replace(id=f"{wanted.id} moved", generated=tuple(answers[wanted.id][:-1]))
        for wanted in generations[::3]
        if len(answers[wanted.id]) > 1
    ]
    then = drive(engine, [*later, *moved], rng, at_once=40)
    for wanted in moved:
        then[wanted.id] = [*wanted.generated, *then[wanted.id]]
    engine.close()
    report = engine.report()
    assert report["memory"]["hit"] > 10 * PAGE
    assert report["preempted"] > 0
    assert report["memory"]["evicted"] > 0
    assert report["adapters"]["host_hits"] == report["adapters"]["loads"] - 2
    for wanted in (*generations, *later, *moved):
        answer = {**answers, **then}[wanted.id]
        scores = logits(models[wanted.adapter], [*wanted.prompt, *answer[:-1]])[len(wanted.prompt) - 1 :]
        assert torch.equal(scores.argmax(-1), torch.tensor(answer)), wanted
