"""The benchmark's outcomes, and the baselines whose point is policy: who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.waiting import HANGS_AFTER_S
from tokenizers import Tokenizer

from pliant.bench.findings import interleaved
from pliant.bench.llm import checkpoints, long_prompt, outcome, roofline
from pliant.bench.llm.our_kernels import decode, instances
from pliant.bench.llm.ours import Fused
from pliant.bench.llm.outcome import MissingTokensError, Outcome, Recorder
from pliant.bench.llm.systems import Batch, ConcurrentInstances, DynamicBatching
from pliant.bench.llm.with_transformers import ContinuousBatching
from pliant.bench.llm.workload import Request, Workload, at_once, every, prompts
from pliant.kernels.decoder.executor import load


class Clock:
    """Stands in for the module `time`: it goes on only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outcome, "time", clock)
    return clock


def workload(tokens: Sequence[int]) -> list[Request]:
    return at_once(prompts(len(tokens), 4, 100, seed=0), tokens)


class Batches:
    """Answers at once, and remembers who came together."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, batch: Batch, recorder: Recorder) -> None:
        self.seen.append([index for index, _ in batch])
        recorder.note_all((index, request.tokens) for index, request in batch)


@pytest.mark.usefixtures("clock")
def test_an_outcome_tells_first_and_last_tokens_and_totals() -> None:
    requests = every(1, workload([2, 1]))
    recorder = Recorder(threads=1)
    recorder.wait_until(2)
    recorder.note_all([(0, 1), (1, 1)])
    recorder.wait_until(4)
    recorder.note(0, 1)
    outcome = recorder.outcome(requests)
    assert outcome.tokens == 3
    assert outcome.first.tolist() == [2, 2]
    assert outcome.last.tolist() == [4, 2]
    assert outcome.latencies.tolist() == [4, 1]
    assert outcome.to_first_token.tolist() == [2, 1]
    assert outcome.total_s == 4
    assert outcome.overlap == pytest.approx(2.5 / 4)
    assert outcome.gaps(0, 0.0, 4.0).tolist() == [2]
    assert outcome.gaps(0, 0.0, 3.0).tolist() == []
    assert [part.tolist() for part in outcome.progress()] == [[2, 2, 4], [1, 2, 3]]


@pytest.mark.parametrize("noted", [1, 3])
def test_a_system_that_does_other_work_than_it_was_given_is_no_outcome(noted: int) -> None:
    recorder = Recorder(threads=1)
    recorder.note(0, noted)
    with pytest.raises(MissingTokensError, match=f"request 0 got {noted}, not 2"):
        recorder.outcome(workload([2]))


@pytest.mark.usefixtures("clock")
def test_a_batch_of_one_is_one_after_the_other_and_a_full_batch_goes_at_once() -> None:
    for most, expected in ((1, [[0], [1], [2], [3]]), (2, [[0, 1], [2, 3]]), (4, [[0, 1, 2, 3]])):
        batches = Batches()
        DynamicBatching(batches, window_s=30.0 if most > 1 else 0.0, most=most).run(workload([1] * 4))
        assert batches.seen == expected


@pytest.mark.usefixtures("clock")
def test_a_window_opens_with_the_oldest_request_and_takes_those_that_arrive_in_it() -> None:
    batches = Batches()
    run = DynamicBatching(batches, window_s=2.5, most=8).run(every(1, workload([1] * 4)))
    assert batches.seen == [[0, 1, 2], [3]]
    assert run.last.tolist() == [2.5, 2.5, 2.5, 5.5]


def test_requests_that_arrive_during_a_batch_wait_for_its_end(clock: Clock) -> None:
    class Slow(Batches):
        def __call__(self, batch: Batch, recorder: Recorder) -> None:
            clock.sleep(10)
            super().__call__(batch, recorder)

    batches = Slow()
    DynamicBatching(batches, window_s=0.0, most=8).run(every(1, workload([1] * 4)))
    assert batches.seen == [[0], [1, 2, 3]]


def test_instances_run_side_by_side_each_on_one_thread_of_torch() -> None:
    together = threading.Barrier(4)
    before = torch.get_num_threads()

    def generate(batch: Batch, recorder: Recorder) -> None:
        assert torch.get_num_threads() == 1
        together.wait(HANGS_AFTER_S)
        recorder.note_all((index, request.tokens) for index, request in batch)

    assert ConcurrentInstances(generate).run(workload([1] * 4)).threads == 4
    assert torch.get_num_threads() == before


def test_an_instance_that_fails_fails_the_run() -> None:
    def generate(batch: Batch, recorder: Recorder) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        ConcurrentInstances(generate).run(workload([1, 1]))


@pytest.mark.parametrize("size", ["block_size", "page_size"])
def test_continuous_batching_is_configured_as_either_transformers_names_it(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare CUDA image has 5.17, which has blocks where later versions have pages."""
    names = (size, "num_blocks", "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing")
    monkeypatch.setattr("transformers.ContinuousBatchingConfig", make_dataclass("Config", names))
    model = SimpleNamespace(generation_config=SimpleNamespace(update=lambda **_: None))
    made = ContinuousBatching(model, tokens=1024, most=2)
    assert getattr(made._config, size) == 32
    assert made._config.num_blocks == 1024 // 32 + 2


def test_systems_take_turns() -> None:
    ran: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, workload: Workload) -> Outcome:
            ran.append(self.name)
            return DynamicBatching(Batches(), 0.0, 4).run(workload)

    outcomes = interleaved({name: Named(name) for name in "abc"}, workload([1, 2]), 3, lambda: None)
    assert [sorted(ran[start : start + 3]) for start in (0, 3, 6)] == [["a", "b", "c"]] * 3
    assert {name: len(runs) for name, runs in outcomes.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = checkpoints.Size("tiny", hidden=64, layers=2, heads=2, intermediate=96, vocab=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return checkpoints.checkpoint(size, "float32")


def test_instances_share_weights_and_answer_as_one_alone(folder: Path) -> None:
    texts = prompts(4, 8, 300, seed=0)
    batch = np.stack(list(decode(load(folder, 4, 64), texts, 12)), axis=1)
    executors = instances(folder, 4, 64, "float32")
    answers: dict[int, list[int]] = {}

    def answer(index: int) -> None:
        answers[index] = [int(tokens[0]) for tokens in decode(executors[index], [texts[index]], 12)]

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[index] for index in range(4)] == batch.tolist()


def test_our_engine_gives_every_request_its_tokens_with_and_without_compaction(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    executor = load(folder, 4, 64)
    requests = at_once(prompts(6, 8, 300, seed=0), [3, 9, 1, 12, 5, 7])
    for compact in (True, False):
        outcome = Fused(executor, tokenizer, compact=compact).run(requests)
        assert outcome.tokens == 37
        assert 12 <= outcome.passes <= 37


class OneLongPrompt:
    """Stands in for the engine: steps of 10 ms, and a long prompt that takes 400 ms of them, `chunk_s` in each."""

    def __init__(self, clock: Clock, chunk_s: float) -> None:
        self.clock = clock
        self.chunk_s = chunk_s

    def run(self, workload: Workload) -> Outcome:
        recorder = Recorder(threads=1)
        left = {index: request.tokens for index, request in enumerate(workload)}
        prefill = {index: 0.4 for index, request in enumerate(workload) if len(request.prompt) > 8}
        while any(left.values()):
            arrived = [index for index in left if left[index] and workload[index].at_s <= recorder.now()]
            for index in prefill:
                if index in arrived and prefill[index] > 1e-9:
                    prefill[index] -= self.chunk_s
                    self.clock.sleep(self.chunk_s)
            self.clock.sleep(0.01)
            ready = [index for index in arrived if prefill.get(index, 0) < 1e-9]
            recorder.note_all((index, 1) for index in ready)
            left |= {index: left[index] - 1 for index in ready}
        return recorder.outcome(workload)


def test_the_stall_by_a_long_prompt_is_what_its_chunks_add_to_a_step(clock: Clock) -> None:
    scale = long_prompt.Scale(long=64, short=8, shorts=3, live=2, answer=60, repetitions=2)
    systems = {
        long_prompt.CHUNKED: OneLongPrompt(clock, 0.04),
        long_prompt.WHOLE: OneLongPrompt(clock, 0.4),
        long_prompt.IN_ORDER: OneLongPrompt(clock, 0.2),
    }
    runs: list[None] = []
    found = long_prompt.measure(systems, scale, 100, lambda: runs.append(None))
    figures = {figure.name: figure for figure in found.figures}
    assert len(runs) == scale.runs
    assert figures["stall_over_bound"].value == pytest.approx(0.04 / long_prompt.STALL_S, rel=0.01)
    assert figures["stall_over_bound"].beside.endswith("without chunks: 8")
    assert 0 < figures["ttft_p99_during_long_prefill"].value < 1
    assert figures["short_ttft_p99_behind_long_prompts_vs_before"].value == pytest.approx(0.05 / 0.21, rel=0.2)


def test_the_roofline_has_a_fraction_for_each_batch(folder: Path) -> None:
    executor = load(folder, 2, 64)
    alone, both = roofline.fractions(executor, torch.float32, (1, 2), context=16, steps=4, repetitions=2)
    assert [alone.name, both.name] == ["roofline_fraction_b1", "roofline_fraction_b2"]
    assert alone.target == ">= 0.75"
    assert 0 < alone.low <= alone.value <= alone.high
