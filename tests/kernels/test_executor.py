"""Iterations of an executor: greedy answers are transformers', whatever else shares the slots and whenever it comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from decoders import FAMILIES, greedy, logits, save
from numpy.typing import NDArray

from pliant.kernels import executor
from pliant.kernels.executor import Executor, Prefill, Step
from pliant.kernels.kv_slots import KVMemoryError
from pliant.kernels.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass
class Request:
    prompt: list[int]
    tokens: int
    """How many to answer with."""
    arrival: int
    """The iteration from which it may have a slot."""
    sampling: Sampling = GREEDY
    slot: int = -1
    stored: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return bool(self.answer)

    @property
    def left(self) -> NDArray[np.int32]:
        """What of the prompt is not stored yet."""
        return np.array(self.prompt[self.stored :], np.int32)


class Scheduler:
    """Puts requests into slots as carelessly as the contract allows: chunks of random sizes, windows with holes and
    any offset, and random moves to slots that are free."""

    def __init__(self, run: Executor, requests: list[Request], rng: np.random.Generator) -> None:
        self.run = run
        self.waiting = sorted(requests, key=lambda request: request.arrival)
        self.live: list[Request] = []
        self.rng = rng

    def serve(self) -> None:
        now = 0
        while self.waiting or self.live:
            self._admit(now)
            self._move()
            self._iterate()
            now += 1

    def _free(self) -> list[int]:
        return sorted(set(range(self.run.slots)) - {request.slot for request in self.live})

    def _admit(self, now: int) -> None:
        while self.waiting and self.waiting[0].arrival <= now and (free := self._free()):
            request = self.waiting.pop(0)
            request.slot = int(self.rng.choice(free))
            self.run.admit(request.slot, request.sampling)
            self.live.append(request)

    def _move(self) -> None:
        targets = self._free()
        movers = self.rng.permutation(len(self.live))[: self.rng.integers(0, 3)]
        pairs = list(zip([self.live[i] for i in movers], targets, strict=False))
        self.run.move([(request.slot, target, request.stored) for request, target in pairs])
        for request, target in pairs:
            request.slot = target

    def _chunks(self) -> list[tuple[Request, Prefill]]:
        found = []
        for request in self.live:
            if not request.decodes and (most := int(self.rng.integers(0, 25))):
                ids = request.left[:most]
                found.append((request, Prefill(request.slot, request.stored, ids, len(ids) == len(request.left))))
        return found

    def _iterate(self) -> None:
        decoding = [request for request in self.live if request.decodes]
        chunks = self._chunks()
        for request, chunk in chunks:
            request.stored += len(chunk.ids)
        slots = [request.slot for request in decoding]
        offset, stop = (min(slots), max(slots) + 1) if slots else (0, 0)
        held = {request.slot: (request.stored, len(request.answer)) for request in self.live}
        rows = np.array([held.get(slot, (0, 0)) for slot in range(offset, stop)]).reshape(-1, 2)
        ended = [request for request, chunk in chunks if chunk.last]
        prefills = tuple(chunk for _, chunk in chunks)
        step = Step(prefills, offset, rows[:, 0].astype(np.int32), rows[:, 1], np.zeros(len(ended), np.int64))
        output = self.run.launch(step).result()
        assert (len(output.first), len(output.tokens)) == (len(ended), stop - offset)
        for request in decoding:
            request.stored += 1
            request.answer.append(int(output.tokens[request.slot - offset]))
        for request, token in zip(ended, output.first, strict=True):
            request.answer.append(int(token))
        self.live = [request for request in self.live if len(request.answer) < request.tokens]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    rng = np.random.default_rng(len(name))
    requests = [
        Request(rng.integers(0, 97, rng.integers(1, 60)).tolist(), int(rng.integers(1, 30)), int(rng.integers(0, 40)))
        for _ in range(12)
    ]
    Scheduler(executor.load(tmp_path, slots=5), requests, rng).serve()
    for request in requests:
        assert request.answer == greedy(model, request.prompt, request.tokens)


def test_drawn_answers_depend_on_their_seed_alone(tmp_path: Path) -> None:
    save("qwen3", tmp_path)

    def answers(slots: int, seed: int) -> list[list[int]]:
        rng = np.random.default_rng(1)
        requests = [
            Request(rng.integers(0, 97, 5).tolist(), 20, arrival, Sampling(temperature=0.7, top_p=0.9, seed=arrival))
            for arrival in range(8)
        ]
        Scheduler(executor.load(tmp_path, slots=slots), list(requests), np.random.default_rng(seed)).serve()
        return [request.answer for request in requests]

    alone = answers(slots=1, seed=0)
    assert answers(slots=4, seed=1) == answers(slots=6, seed=2) == alone
    assert len(set(map(tuple, alone))) == 8


def test_a_first_token_outlives_the_row_of_its_slot(tmp_path: Path) -> None:
    model = save("llama2", tmp_path)
    run, prompt = executor.load(tmp_path, slots=2), np.arange(9, dtype=np.int32)
    expected = greedy(model, prompt.tolist(), 3)
    run.admit(1, GREEDY)
    lengths, zeros = np.array([0, 9], np.int32), np.zeros(2, np.int64)
    answer = [*run.launch(Step((Prefill(1, 0, prompt, True),), 0, lengths, zeros, zeros[:1])).result().first]
    for stored in (9, 10):
        step = Step((), 0, np.array([0, stored], np.int32), zeros, zeros[:0])
        answer.append(run.launch(step).result().tokens[1])
    assert answer == expected


def test_log_probabilities_are_told_to_those_who_asked(tmp_path: Path) -> None:
    model = save("llama2", tmp_path)
    run, prompt = executor.load(tmp_path, slots=3), np.arange(9, dtype=np.int32)
    run.admit(0, GREEDY)
    run.admit(1, Sampling(temperature=0.0, logprobs=2))
    none = np.zeros(0, np.int64)
    chunks = tuple(Prefill(slot, 0, prompt, True) for slot in (0, 1))
    output = run.launch(Step(chunks, 0, none.astype(np.int32), none, np.zeros(2, np.int64))).result()
    assert output.first_logprobs is not None
    assert output.logprobs is None
    assert output.first_logprobs[0] is None
    theirs = logits(model, prompt.tolist())[-1].log_softmax(-1).topk(2)
    asked = output.first_logprobs[1]
    assert asked is not None
    assert asked.top_ids == theirs.indices.tolist()
    assert [asked.chosen, *asked.top[1:]] == pytest.approx(theirs.values.tolist(), abs=1e-4)


def test_steps_that_do_not_fit_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    save("llama2", tmp_path)
    run = executor.load(tmp_path, slots=2, max_length=10)
    zeros, chunk = np.zeros(9, np.int64), Prefill(0, 0, np.arange(4, dtype=np.int32), True)

    def step(offset: int, lengths: list[int], indices: int, ended: int) -> Step:
        return Step((chunk,), offset, np.array(lengths, np.int32), zeros[:indices], zeros[:ended])

    with pytest.raises(ValueError, match="the window 1 to 3 is not within 2 slots"):
        run.launch(step(1, [1, 1], 2, 1))
    with pytest.raises(ValueError, match=r"must hold 0 to 9 tokens, one less than max_length; got 3 to 10"):
        run.launch(step(0, [3, 10], 2, 1))
    with pytest.raises(ValueError, match=r"each of 2 rows and 1 prompts that end; got 1 and 0"):
        run.launch(step(0, [3, 4], 1, 0))


def test_loading_chooses_or_refuses_sizes(tmp_path: Path) -> None:
    save("llama2", tmp_path)
    run = executor.load(tmp_path)
    assert (run.slots, run.max_length, run.pipelined) == (32, 96, False)
    assert executor.load(tmp_path, max_length=48, budget_bytes=2**20).slots == 18
    with pytest.raises(KVMemoryError, match="32 slots x 96 tokens x"):
        executor.load(tmp_path, slots=32, max_length=96, budget_bytes=2**20)
    with pytest.raises(ValueError, match="max_length must be 1 to 96"):
        executor.load(tmp_path, max_length=97)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got int8"):
        executor.load(tmp_path, dtype="int8")
