"""Flover, repeated and measured: our engine against instances, batches, transformers and llama.cpp (Flover §VI)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from pliant.bench.findings import Findings
from pliant.bench.llm import (
    against_llama_cpp,
    bound,
    int8,
    llama_cpp,
    long_prompt,
    paper,
    ranks,
    roofline,
    saturated,
    second_turn,
    shared_trace,
    slack,
    with_transformers,
)
from pliant.bench.llm.checkpoints import LARGE, SMALL, checkpoint, gguf
from pliant.bench.llm.our_kernels import Instances, StaticBatch, decode, instances
from pliant.bench.llm.ours import STALL_S, Fused
from pliant.bench.llm.systems import ConcurrentInstances, DynamicBatching, System
from pliant.bench.llm.workload import PAPER_LAMBDAS_MS, Integers, at_once, prompts, uniform_lengths
from pliant.bench.report import Figure, Options, Report, median, paper_and_here
from pliant.deployments.llm.engine import Engine
from pliant.errors import PliantError
from pliant.kernels.decoder import executor

_REQUESTS = 32
_PROMPT = 64
_NEVER_S = 1e6
_BATCHES = (1, 8, 32)
_CONTEXT, _STEPS = 128, 32
_CHECKED, _CHECKED_TOKENS = 8, 24
_SOLO_RUNS = 3


@dataclass(frozen=True)
class _Plan:
    tokens: int
    """Of an answer, where all are alike (512 in the paper)."""
    lengths: tuple[int, int]
    """Where they range."""
    dtypes: tuple[str, ...]
    """Of the small model; the first is what targets are about, and what the paper's figures are repeated with."""
    repetitions: int
    paper: paper.Scale
    roofline_repetitions: int
    long_prompt: long_prompt.Scale
    second_turn: second_turn.Scale
    shared_trace: shared_trace.Scale
    bound: bound.Scale
    slack: slack.Scale
    ranks: ranks.Scale
    int8: int8.Scale
    llama_cpp: bool
    llama_cpp_lengths: tuple[int, int] = (64, 256)


_QUICK = _Plan(
    tokens=32,
    lengths=(16, 64),
    dtypes=("bfloat16",),
    repetitions=2,
    paper=paper.Scale(
        tokens=48, counts=(1, 8, 32), lambdas_ms=(20, 500, 5000), shortest=32, upper=(32, 128),
        windows_ms=(0, 500, 4000, 16_000), repetitions=1,
    ),
    roofline_repetitions=3,
    long_prompt=long_prompt.Scale(long=1536, short=64, shorts=8, live=4, answer=96, repetitions=2),
    second_turn=second_turn.Scale(prompt=512, answer=64, new=32, repetitions=3),
    shared_trace=shared_trace.Scale(one_of=16, repetitions=2),
    bound=bound.Scale(rows=32, steps=16, repetitions=5, schemas=200),
    slack=slack.Scale(requests=100, repetitions=3),
    ranks=ranks.Scale(requests=50, repetitions=3),
    int8=int8.Scale(rows=(1, 4, 8, 32), context=128, steps=16, prompt=256, repetitions=3),
    llama_cpp=False,
)  # fmt: skip
_FULL = _Plan(
    tokens=256,
    lengths=(128, 512),
    dtypes=("bfloat16", "float32"),
    repetitions=3,
    paper=paper.Scale(
        tokens=256, counts=(1, 2, 4, 8, 16, 32), lambdas_ms=PAPER_LAMBDAS_MS, shortest=128,
        upper=(128, 256, 384, 512), windows_ms=(0, 500, 2000, 8000, 16_000), repetitions=3,
    ),
    roofline_repetitions=9,
    long_prompt=long_prompt.Scale(long=1920, short=64, shorts=16, live=8, answer=256, repetitions=5),
    second_turn=second_turn.Scale(prompt=1024, answer=128, new=64, repetitions=9),
    shared_trace=shared_trace.Scale(one_of=4, repetitions=3),
    bound=bound.Scale(rows=32, steps=64, repetitions=9, schemas=200),
    slack=slack.Scale(requests=300, repetitions=9),
    ranks=ranks.Scale(requests=1000, repetitions=9),
    int8=int8.Scale(rows=(1, 4, 8, 32), context=128, steps=32, prompt=256, repetitions=9),
    llama_cpp=True,
)  # fmt: skip


def run(options: Options) -> Report:
    """All of it, into one report; the table "paper / here" is printed."""
    if options.device == "cuda":
        raise PliantError("language models on a GPU are a part of `python -m bench gpu`")
    plan = _QUICK if options.quick else _FULL
    threads = torch.get_num_threads()
    against_others = plan.llama_cpp and llama_cpp.INSTALLED
    found = Findings()
    with Progress(transient=True) as progress:
        task = progress.add_task("llm", total=_runs(plan, against_others, traced=options.data is not None))

        def done() -> None:
            progress.advance(task)

        for number, dtype in enumerate(plan.dtypes):
            found.add(_small_model(plan, dtype, threads, done, repeats_paper=not number))
        found.add(_large_model(plan, threads, done, others=against_others))
        found.add(_long_prompt(plan.long_prompt, threads, done))
        found.add(_second_turn(plan.second_turn, threads, done))
        if options.data:
            found.add(_shared_trace(options.data, plan.shared_trace, threads, done))
        found.add(_bound(plan.bound, threads, done))
        found.figures.append(_agreement(threads))
        found.add(ranks.compare(plan.ranks, done))
        found.add(int8.compare(plan.int8, threads, done))
    Console().print(paper_and_here("Flover's evaluation, repeated", found.rows))
    rows = [row._asdict() for row in found.rows]
    config = {**asdict(plan), "threads": threads, "requests": _REQUESTS, "prompt": _PROMPT, "paper_and_here": rows}
    return Report(found.figures, config, found.plots)


def _runs(plan: _Plan, against_others: bool, traced: bool) -> int:
    saturated_runs = len(plan.dtypes) * plan.repetitions * saturated.RUNS
    llama_cpp_runs = plan.repetitions * against_llama_cpp.RUNS if against_others else 0
    parts = plan.paper, plan.long_prompt, plan.second_turn, plan.bound, plan.slack, plan.ranks, plan.int8
    ours = sum(part.runs for part in parts)
    return saturated_runs + llama_cpp_runs + ours + traced * plan.shared_trace.runs


def _small_model(plan: _Plan, dtype: str, threads: int, done: Callable[[], object], *, repeats_paper: bool) -> Findings:
    """Everything at once and, with `repeats_paper`, the paper's figures, on 15M parameters."""
    folder = checkpoint(SMALL, dtype)
    low, high = plan.lengths
    max_length = _PROMPT + max(high, plan.tokens, plan.paper.tokens, *plan.paper.upper)
    loaded = executor.load(folder, _REQUESTS, max_length, dtype, "cpu", threads)
    own_instances = Instances(instances(folder, _REQUESTS, max_length, dtype))
    generate = with_transformers.Generate(with_transformers.load(folder, dtype, "cpu"))
    systems: dict[str, System] = {
        saturated.OURS: Fused(loaded, _tokenizer(folder)),
        saturated.UNCOMPACTED: Fused(loaded, _tokenizer(folder), compact=False),
        saturated.INSTANCES: ConcurrentInstances(generate),
        saturated.OWN_INSTANCES: ConcurrentInstances(own_instances),
        saturated.ONE_BY_ONE: DynamicBatching(generate, 0, 1),
        saturated.STATIC: DynamicBatching(generate, 0, _REQUESTS),
        saturated.OWN_STATIC: DynamicBatching(StaticBatch(loaded), 0, _REQUESTS),
        saturated.CONTINUOUS: with_transformers.ContinuousBatching(
            with_transformers.load(folder, dtype, "cpu"), _REQUESTS * max_length, _REQUESTS
        ),
    }
    texts = prompts(_REQUESTS, _PROMPT, SMALL.vocab, seed=0)
    alike = at_once(texts, [plan.tokens] * _REQUESTS)
    ranging = at_once(texts, uniform_lengths(_REQUESTS, low, high, seed=0))
    for system in systems.values():
        system.run(at_once(texts[:4], [4] * 4))
    suffix = "" if repeats_paper else f"_{dtype}"
    found = saturated.compare(systems, alike, ranging, plan.repetitions, done, suffix)
    if repeats_paper:
        ours = systems[saturated.OURS]
        bench = paper.Bench(ours, systems[saturated.UNCOMPACTED], systems[saturated.OWN_INSTANCES], StaticBatch(loaded))
        found.add(paper.repeat(bench, texts, plan.paper, _solo_s(ours, texts, plan.paper.tokens), done))
    return found


def _large_model(plan: _Plan, threads: int, done: Callable[[], object], *, others: bool) -> Findings:
    """Steps against memory's bandwidth, and the engine against llama.cpp, on 120M parameters in bfloat16."""
    dtype = "bfloat16"
    folder = checkpoint(LARGE, dtype)
    low, high = plan.llama_cpp_lengths
    max_length = _PROMPT + max(high, _CONTEXT + _STEPS)
    loaded = executor.load(folder, _REQUESTS, max_length, dtype, "cpu", threads)
    found = Findings(roofline.fractions(loaded, torch.bfloat16, _BATCHES, _CONTEXT, _STEPS, plan.roofline_repetitions))
    if others:
        texts = prompts(_REQUESTS, _PROMPT, LARGE.vocab, seed=0)
        together = at_once(texts, uniform_lengths(_REQUESTS, low, high, seed=0))
        ours, model = Fused(loaded, _tokenizer(folder)), gguf(LARGE, dtype)
        found.add(against_llama_cpp.compare(ours, model, threads, max_length, together, plan.repetitions, done))
    return found


def _long_prompt(scale: long_prompt.Scale, threads: int, done: Callable[[], object]) -> Findings:
    """On 120M parameters in bfloat16, where prompts take long."""
    folder = checkpoint(LARGE, "bfloat16")
    slots = scale.live + scale.shorts + 1
    loaded = executor.load(folder, slots, scale.long + _PROMPT, "bfloat16", "cpu", threads)
    systems: dict[str, System] = {
        long_prompt.CHUNKED: Fused(loaded, _tokenizer(folder)),
        long_prompt.WHOLE: Fused(loaded, _tokenizer(folder), stall_s=_NEVER_S),
        long_prompt.IN_ORDER: Fused(loaded, _tokenizer(folder), order="fifo"),
    }
    return long_prompt.measure(systems, scale, LARGE.vocab, done)


def _second_turn(scale: second_turn.Scale, threads: int, done: Callable[[], object]) -> Findings:
    """On the same model."""
    folder = checkpoint(LARGE, "bfloat16")
    longest = scale.prompt + scale.answer + scale.new + 1
    loaded = executor.load(folder, 4, longest, "bfloat16", "cpu", threads)
    engine = Engine(loaded, _tokenizer(folder), (), queue=1, stall_s=STALL_S)
    return second_turn.measure(engine, scale, LARGE.vocab, done)


def _shared_trace(data: Path, scale: shared_trace.Scale, threads: int, done: Callable[[], object]) -> Findings:
    """On the same model."""
    folder = checkpoint(LARGE, "bfloat16")
    loaded = executor.load(folder, _REQUESTS, shared_trace.LONGEST, "bfloat16", "cpu", threads)
    return shared_trace.measure(Fused(loaded, _tokenizer(folder)), data, scale, LARGE.vocab, done)


def _bound(scale: bound.Scale, threads: int, done: Callable[[], object]) -> Findings:
    """What a step costs on 120M parameters, and whether answers of 15M fit, all in bfloat16."""
    found = Findings()
    for size, length, measure in ((LARGE, scale.length, bound.overhead), (SMALL, bound.VALID_LENGTH, bound.valid)):
        folder = checkpoint(size, "bfloat16")
        loaded = executor.load(folder, scale.rows, length, "bfloat16", "cpu", threads)
        tokenizer = _tokenizer(folder)
        engine = Engine(loaded, tokenizer, (bound.end(tokenizer),), queue=scale.schemas, stall_s=STALL_S)
        found.add(measure(engine, scale, size.vocab, done))
    return found


def _slack(scale: slack.Scale, threads: int, done: Callable[[], object]) -> Findings:
    """On 15M parameters in bfloat16."""
    folder = checkpoint(SMALL, "bfloat16")
    loaded = executor.load(folder, slack.SLOTS, slack.LENGTH, "bfloat16", "cpu", threads)
    engine = Engine(loaded, _tokenizer(folder), (), queue=scale.requests, stall_s=STALL_S)
    return slack.measure(engine, scale, SMALL.vocab, done)


def _agreement(threads: int) -> Figure:
    """How many answers are transformers' token for token, in float32."""
    folder = checkpoint(SMALL, "float32")
    texts = prompts(_CHECKED, _PROMPT, SMALL.vocab, seed=3)
    loaded = executor.load(folder, _CHECKED, _PROMPT + _CHECKED_TOKENS, "float32", "cpu", threads)
    ours = np.stack(list(decode(loaded, texts, _CHECKED_TOKENS)), axis=1)
    theirs = with_transformers.greedy(with_transformers.load(folder, "float32", "cpu"), texts, _CHECKED_TOKENS)
    equal = (ours == theirs).all(axis=1).mean()
    return median(
        "answers_equal_to_transformers", [float(equal)], "1", f"{_CHECKED} of {_CHECKED_TOKENS} tokens, float32"
    )


def _solo_s(ours: System, texts: Sequence[Integers], tokens: int) -> float:
    """What one request alone takes, in seconds."""
    alone = at_once(texts[:1], [tokens])
    return statistics.median(ours.run(alone).total_s for _ in range(_SOLO_RUNS))


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
