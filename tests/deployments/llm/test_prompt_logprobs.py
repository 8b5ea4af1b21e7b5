"""How likely the tokens of a prompt are: told once, whatever is computed beside it, and never from another's pages."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import prompt_scores, scripted_executor
from support.decoders import FAMILIES, logits, save
from support.foretold import Foretold
from support.lora_adapters import KINDS, adapt
from support.scripted_executor import EOS, ScriptedExecutor, byte_tokenizer

from pliant.deployments.llm.adapter_loader import AdapterLoader, PeftFolders
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece, TokenLogprobs, merged
from pliant.formats.adapter_info import AdapterRef, bytes_of, read_adapter
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.kv_pages import PAGE
from pliant.models.sources import describe_decoder
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_LENGTH, OWN_PAGE, VOCAB = 64, 4, 97
TOKENIZER = byte_tokenizer()
GREEDY = Sampling(temperature=0)


def drive(engine: Engine, generations: list[Generation], rng: random.Random) -> dict[str, Piece]:
    """All answers; requests come a few at a time."""
    pieces: dict[str, list[Piece]] = {generation.id: [] for generation in generations}
    coming = list(generations)
    while coming or engine.busy:
        for _ in range(min(rng.choice((0, 0, 1, 3)), len(coming))):
            engine.add(coming.pop(0))
        for name, item in engine.step():
            assert isinstance(item, Piece), item
            assert not (pieces[name] and item.prompt_logprobs is not None), "they are told once"
            pieces[name].append(item)
    return {name: merged(parts) for name, parts in pieces.items()}


def little(pages: int, pipelined: bool = False, stall_s: float = 1.0, **options: Any) -> Engine:
    """An engine with so many pages, that checks itself."""
    run = ScriptedExecutor(4, MAX_LENGTH, pipelined, page=OWN_PAGE)
    run.arena_bytes = pages * run.page_bytes
    clock = itertools.count()
    return Engine(run, TOKENIZER, (EOS,), 100, stall_s, lambda: next(clock) * 1e-3, debug=True, **options)


def scripted(generation: Generation) -> tuple[TokenLogprobs, ...] | None:
    """What the scripted executor finds of the prompt."""
    if generation.prompt_logprobs is None or generation.generated:
        return None
    text = [scripted_executor.stored(token, 0) for token in generation.prompt]
    found = []
    for at, token in enumerate(generation.prompt[1:], 1):
        row = scripted_executor.score(text[:at], token, generation.prompt_logprobs)
        found.append(TokenLogprobs(token, row.chosen, tuple(row.top_ids), tuple(row.top), row.rank))
    return tuple(found)


@settings(max_examples=150)
@given(
    pipelined=st.booleans(),
    pages=st.sampled_from((16, 24, 60)),
    stall_s=st.sampled_from((0.001, 0.05, 10.0)),
    asked=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 16), st.integers(0, 1), st.none() | st.integers(0, 2)), max_size=12
    ),
    seed=st.integers(0, 9),
)
def test_scores_are_right_whatever_else_there_is(
    pipelined: bool, pages: int, stall_s: float, asked: list[tuple[int, int, int, int | None]], seed: int
) -> None:
    """Prompts begin alike, some answers were begun elsewhere, and where pages are few, some are put back."""
    engine = little(pages, pipelined, stall_s, predictor=Foretold(1))
    generations = [
        Generation(
            str(number),
            tuple((token + 50 * kind) % 100 for token in range(prompt)),
            tokens + 1,
            Sampling(seed=number),
            generated=(97,) * (number % 3 == 2),
            ignore_eos=True,
            prompt_logprobs=alternatives,
        )
        for number, (prompt, tokens, kind, alternatives) in enumerate(asked)
    ]
    answers = drive(engine, generations, random.Random(seed))
    for generation in generations:
        answer = answers[generation.id]
        assert answer.prompt_logprobs == scripted(generation)
        if answer.prompt_logprobs is not None:
            assert answer.cached == 0
            assert list(answer.tokens) == scripted_executor.expected(generation, MAX_LENGTH)


def test_a_prompt_that_is_there_is_computed_again_and_then_shared() -> None:
    engine = little(64)
    plain = Generation("plain", tuple(range(20)), 2, Sampling(), ignore_eos=True)
    scored = plain._replace(id="scored", prompt_logprobs=0)
    rng = random.Random(0)
    drive(engine, [plain], rng)
    idle = engine.report()["memory"]["idle"]
    assert drive(engine, [scored], rng)["scored"].prompt_logprobs == scripted(scored)
    assert engine.report()["memory"]["hit"] == 0
    assert engine.report()["memory"]["idle"] == idle, "what is computed twice is kept once"
    assert drive(engine, [plain], rng)["plain"].cached == 16


@pytest.mark.parametrize("pipelined", [False, True])
def test_who_makes_way_within_its_prompt_is_scored_from_its_beginning(pipelined: bool) -> None:
    """The middle one is at its prompt when the first gets longer than predicted; the last has its answer begun."""
    engine = little(26, pipelined, stall_s=1e-9, predictor=Foretold(4))
    middle = Generation("middle", tuple(range(1, 56)), 8, Sampling(), ignore_eos=True, prompt_logprobs=1)
    last = Generation("last", tuple(range(60, 90)), 30, Sampling(), ignore_eos=True, prompt_logprobs=0)
    engine.add(Generation("first", tuple(range(100, 104)), 50, Sampling(), ignore_eos=True))
    engine.step()
    engine.add(middle)
    engine.step()
    engine.add(last)
    pieces: dict[str, list[Piece]] = {"first": [], "middle": [], "last": []}
    preempted = False
    while engine.busy:
        for name, item in engine.step():
            assert isinstance(item, Piece), item
            pieces[name].append(item)
        if engine.report()["preempted"] and not preempted:
            preempted = True
            assert not pieces["middle"], "it was within its prompt"
            assert pieces["last"]
    assert preempted
    for wanted in (middle, last):
        assert pieces[wanted.id][0].prompt_logprobs == scripted(wanted)
        assert all(piece.prompt_logprobs is None for piece in pieces[wanted.id][1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Chunks of all sizes, prompts that begin alike, and requests that ask for nothing of the sort."""
    models: dict[AdapterRef | None, PreTrainedModel] = {None: save(family, tmp_path)}
    rng = random.Random(family)
    generations = mixture(rng, 24, models)
    loaded = executor.load(tmp_path, slots=6)
    engine = Engine(loaded, TOKENIZER, (), queue=100, stall_s=0.002, debug=True)
    compare(models, generations, drive(engine, generations, rng))
    assert engine.report()["memory"]["hit"] > 0


def test_with_adapters_and_little_memory_they_are_those_of_peft(tmp_path: Path) -> None:
    family = "llama3"
    models: dict[AdapterRef | None, PreTrainedModel] = {None: save(family, tmp_path)}
    shape = describe_decoder(tmp_path).shape
    for number, kind in enumerate([*KINDS][:2]):
        folder = tmp_path / f"adapter-{number}"
        model = adapt(family, kind, folder, seed=number)
        models[read_adapter(folder, shape).ref(folder.name)] = model
    rng = random.Random(0)
    largest = max(bytes_of(ref.ranks, shape, 4) for ref in models if ref)
    loaded = executor.load(tmp_path, slots=8, budget_bytes=largest + 8 * shape.kv_bytes(PAGE, 4), most_rank=256)
    cache: AdapterCache[AdapterRef] = AdapterCache("joint")
    engine = Engine(
        *(loaded, TOKENIZER, (), 200, 0.002),
        debug=True,
        scheduler=Scheduler(MultiQueue(QueueClasses(1.0)), cache, loaded.arena_bytes, slots=loaded.slots),
        predictor=Foretold(1),
        loader=AdapterLoader(PeftFolders(loaded, 4, 256)),
    )
    generations = mixture(rng, 40, models)
    answers = drive(engine, generations, rng)
    engine.close()
    assert engine.report()["preempted"] > 0
    compare(models, generations, answers)


def mixture(rng: random.Random, count: int, models: dict[AdapterRef | None, PreTrainedModel]) -> list[Generation]:
    opening = tuple(rng.randrange(VOCAB) for _ in range(PAGE + 1))
    return [
        Generation(
            str(number),
            (*(opening if rng.random() < 0.5 else ()), *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 15)))),
            rng.randint(1, 15) if rng.random() < 0.7 else 60,
            GREEDY,
            adapter=rng.choice(list(models)),
            prompt_logprobs=rng.choice((None, 0, 3)),
        )
        for number in range(count)
    ]


def compare(
    models: dict[AdapterRef | None, PreTrainedModel], generations: list[Generation], answers: dict[str, Piece]
) -> None:
    for generation in generations:
        answer, wanted = answers[generation.id], generation.prompt_logprobs
        prompt = list(generation.prompt)
        scores = logits(models[generation.adapter], [*prompt, *answer.tokens[:-1]])[len(prompt) - 1 :]
        assert torch.equal(scores.argmax(-1), torch.tensor(answer.tokens)), generation
        if wanted is None:
            assert answer.prompt_logprobs is None
            continue
        rows = answer.prompt_logprobs
        assert rows is not None
        assert [row.token for row in rows] == prompt[1:]
        prompt_scores.check(models[generation.adapter], prompt, rows, [row.logprob for row in rows], wanted)
