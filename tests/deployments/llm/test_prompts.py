"""Whose prompt is computed when: short ones not behind long ones, none starves, and answers keep their pace."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_executor import EOS, WEIGHT_BYTES, ScriptedAdapters, ScriptedExecutor, adapter, byte_tokenizer

from pliant.deployments.llm.adapter_loader import AdapterLoader
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece
from pliant.kernels.decoder.decode_step import Launched, Step
from pliant.policies.llm.passes import AGEING, ALONE_S
from pliant.policies.llm.prefill_chunks import CHUNK_MULTIPLE
from pliant.sampling import Sampling

MAX_LENGTH = 4096
STEP_S, TOKEN_S = 1e-3, 1e-4
STALL_S = 0.01


class Timed(ScriptedExecutor):
    """An iteration takes a millisecond, and a tenth of one for each token of a prompt."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, MAX_LENGTH, page=64, arena_bytes=1 << 12)
        self.now = 0.0

    def launch(self, step: Step) -> Launched:
        self.now += STEP_S + TOKEN_S * prompt_tokens(step)
        return super().launch(step)


def prompt_tokens(step: Step) -> int:
    return sum(len(prefill.ids) for prefill in step.prefills)


def engine(executor: Timed, **options: Any) -> Engine:
    return Engine(executor, byte_tokenizer(), (EOS,), 1000, STALL_S, clock=lambda: executor.now, debug=True, **options)


def generation(id: str, prompt: int, answer: int, seed: int, **options: Any) -> Generation:
    tokens = tuple((seed + index) % 250 for index in range(prompt))
    return Generation(id, tokens, answer, Sampling(seed=seed), ignore_eos=True, **options)


def first_tokens(served: Engine, executor: Timed) -> dict[str, float]:
    """When each request had its first token, all of them answered."""
    first: dict[str, float] = {}
    while served.busy:
        for id, piece in served.step():
            assert isinstance(piece, Piece), piece
            first.setdefault(id, executor.now)
    return first


@settings(max_examples=60)
@given(
    slots=st.integers(1, 6),
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3000), st.integers(2, 60)), min_size=1, max_size=12),
)
def test_an_iteration_takes_no_longer_than_answers_may_wait(slots: int, arrivals: list[tuple[int, int, int]]) -> None:
    executor = Timed(slots)
    served = engine(executor)
    served.rehearse()
    seen = len(executor.steps)
    for index, (steps, prompt, answer) in enumerate(arrivals):
        for _ in range(steps):
            served.step()
        served.add(generation(str(index), prompt, answer, seed=index))
    first_tokens(served, executor)
    assert served.report()["served"] == len(arrivals)
    for step in executor.steps[seen:]:
        limit_s = STALL_S if len(step.lengths) else ALONE_S
        assert prompt_tokens(step) <= max(CHUNK_MULTIPLE, limit_s / TOKEN_S) * 1.001


def test_short_prompts_pass_long_ones_and_in_order_of_arrival_they_do_not() -> None:
    waits = {}
    for order in ("shortest", "fifo"):
        executor = Timed(slots=4)
        served = engine(executor, order=order)
        served.rehearse()
        served.add(generation("answer", 8, 400, seed=1))
        served.step()
        for index, prompt in enumerate((3500, 3400, 40)):
            served.add(generation(str(prompt), prompt, 2, seed=20 * index))
        began, first = executor.now, first_tokens(served, executor)
        waits[order] = first["40"] - began
        assert (first["3400"] < first["3500"]) == (order == "shortest")
    assert waits["shortest"] < 0.1 * waits["fifo"]


def test_a_long_prompt_goes_on_though_short_ones_keep_coming() -> None:
    """As many as there is room for, all the time, so that they leave nothing over."""
    slots = 8
    executor = Timed(slots)
    served = engine(executor)
    served.rehearse()
    long_s, short = 3000 * TOKEN_S, 200
    served.add(generation("answer", 8, 4000, seed=9))
    served.step()
    served.add(generation("long", 3000, 2, seed=1))
    began, sent, first = executor.now, 0, {}
    while "long" not in first:
        while served.report()["waiting"] < slots:
            served.add(generation(str(sent), short, 3, seed=sent))
            sent += 1
        for id, _ in served.step():
            first.setdefault(id, executor.now)
        passed = executor.now - began
        assert passed < 3 * (long_s / AGEING), f"{sent} short ones were let in"
    assert len(first) > 10, "short ones pass it meanwhile"


def test_a_token_takes_longer_by_what_its_adapter_weighs() -> None:
    executor = Timed(slots=3)
    heavy = adapter("heavy", WEIGHT_BYTES)
    served = engine(executor, loader=AdapterLoader(ScriptedAdapters()))
    served.rehearse()
    served.pin(heavy)
    served.add(generation("answer", 8, 400, seed=9))
    served.step()
    served.add(generation("adapted", 600, 2, seed=1, adapter=heavy))
    served.add(generation("plain", 1000, 2, seed=50))
    first = first_tokens(served, executor)
    served.close()
    assert first["plain"] < first["adapted"]
