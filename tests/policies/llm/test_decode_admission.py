"""Admission to the decode loop: predictions that follow the load, and refusals that say when to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.llm.decode_admission import (
    DecodeAdmission,
    LateError,
    Load,
    QueueFullError,
    Waiting,
    first_token_s,
)

counts = st.integers(1, 500)
loads = st.builds(
    Load,
    free=st.integers(0, 4),
    live=st.lists(counts, min_size=1, max_size=6),
    prompt=st.integers(0, 500),
    waiting=st.lists(st.builds(Waiting, counts, counts), max_size=6),
    behind=st.integers(0, 6),
    ready_s=st.floats(0, 10),
)
ratios = st.floats(0.01, 1)
seconds = st.floats(1e-4, 0.1)
rates = st.floats(10, 1e5)
ROUNDING = 1e-9


def steps_until_free(load: Load) -> int:
    """Simulated step by step: after how many a further request gets a slot."""
    left = [*load.live, *(0 for _ in range(load.free))]
    waiting = list(load.waiting)
    for step in range(10_000):
        while 0 in left and waiting:
            left[left.index(0)] = waiting.pop(0).answer
        if 0 in left:
            return step
        left = [tokens - 1 if tokens else 0 for tokens in left]
    raise AssertionError


@given(loads)
def test_equals_a_simulation_when_answers_have_their_maximal_length(load: Load) -> None:
    assert first_token_s(load, 1, 1.0, 1.0, 0) == max(steps_until_free(load), load.ready_s)


@given(loads, counts, ratios, seconds, rates, st.data())
def test_more_load_never_comes_sooner(
    load: Load, prompt: int, ratio: float, step_s: float, rate: float, data: st.DataObject
) -> None:
    base = first_token_s(load, prompt, ratio, step_s, rate)
    place = data.draw(st.integers(0, len(load.waiting)))
    further = data.draw(st.builds(Waiting, counts, counts))
    index = data.draw(st.integers(0, len(load.live) - 1))
    longer = [tokens + (7 if place == index else 0) for place, tokens in enumerate(load.live)]
    busier = [
        (load._replace(waiting=[*load.waiting[:place], further, *load.waiting[place:]]), prompt, ratio, step_s, rate),
        (load._replace(live=longer), prompt, ratio, step_s, rate),
        (load._replace(prompt=load.prompt + 5), prompt, ratio, step_s, rate),
        (load._replace(ready_s=load.ready_s + 1), prompt, ratio, step_s, rate),
        (load, prompt + 5, ratio, step_s, rate),
        (load, prompt, min(1.0, ratio * 1.1), step_s, rate),
        (load, prompt, ratio, step_s * 1.1, rate),
        (load, prompt, ratio, step_s, rate / 1.1),
    ]
    assert all(first_token_s(*arguments) >= base - ROUNDING for arguments in busier)
    assert first_token_s(load._replace(free=load.free + 1), prompt, ratio, step_s, rate) <= base + ROUNDING


@given(loads, counts, seconds, rates, st.floats(0, 10))
def test_what_is_admitted_is_predicted_in_time_even_if_it_waits_a_little_longer(
    load: Load, prompt: int, step_s: float, rate: float, within_s: float
) -> None:
    wait_s = first_token_s(load, prompt, 1.0, step_s, rate) - (prompt / rate if rate else 0.0)
    predicted_s = first_token_s(load, prompt, 1.0, step_s, rate) + 0.1 * wait_s
    admission = DecodeAdmission(queue=100)
    if predicted_s <= within_s - ROUNDING:
        admission.admit(load, prompt, within_s, step_s, rate)
    elif predicted_s > within_s + ROUNDING:
        with pytest.raises(LateError) as refused:
            admission.admit(load, prompt, within_s, step_s, rate)
        assert refused.value.retry_after_s == pytest.approx(predicted_s - within_s, abs=ROUNDING)
    admission.admit(load, prompt, None, step_s, rate)


def test_a_full_queue_says_when_its_head_leaves_it() -> None:
    admission = DecodeAdmission(queue=1)
    load = Load(free=0, live=[30, 50], prompt=0, waiting=[Waiting(10, 10)])
    with pytest.raises(QueueFullError, match=r"1 requests wait already, of at most 1; retry after 3\.0 s") as refused:
        admission.admit(load, 10, None, 0.1, 100)
    assert refused.value.retry_after_s == pytest.approx(3.0)


def test_those_that_it_will_pass_fill_the_queue_and_keep_nobody_waiting() -> None:
    load = Load(free=0, live=[10], prompt=0, waiting=[Waiting(10, 10)], behind=3)
    with pytest.raises(QueueFullError, match="4 requests wait already, of at most 4"):
        DecodeAdmission(queue=4).admit(load, 10, None, 0.1, 100)
    assert first_token_s(load, 10, 1.0, 0.1, 0) == first_token_s(load._replace(behind=0), 10, 1.0, 0.1, 0)


def test_an_adapter_is_loaded_while_a_slot_is_waited_for() -> None:
    load = Load(free=0, live=[30], prompt=0, waiting=[], ready_s=2.0)
    assert first_token_s(load, 10, 1.0, 0.1, 10) == pytest.approx(3.0 + 1.0)
    assert first_token_s(load._replace(ready_s=5.0), 10, 1.0, 0.1, 10) == pytest.approx(5.0 + 1.0)
    assert DecodeAdmission(queue=1).next_turn_s(load._replace(ready_s=5.0), 0.1, 10) == pytest.approx(3.0)


def test_free_slots_are_no_queue() -> None:
    admission = DecodeAdmission(queue=0)
    admission.admit(Load(free=1, live=[], prompt=0, waiting=[]), 10, None, 0.1, 100)
    with pytest.raises(QueueFullError):
        admission.admit(Load(free=1, live=[], prompt=0, waiting=[Waiting(10, 10)]), 10, None, 0.1, 100)


def test_what_is_not_measured_refuses_nobody() -> None:
    load = Load(free=0, live=[500], prompt=500, waiting=[Waiting(500, 500)])
    DecodeAdmission(queue=9).admit(load, 500, 0.001, 0, 0)


@given(st.lists(st.tuples(counts, st.floats(0, 1)), max_size=50))
def test_the_ratio_stays_a_ratio(answers: list[tuple[int, float]]) -> None:
    admission = DecodeAdmission(queue=1)
    for most, share in answers:
        admission.ended(int(most * share), most)
    assert 0 <= admission.ratio <= 1


def test_short_answers_admit_more() -> None:
    admission = DecodeAdmission(queue=9)
    load = Load(free=0, live=[100], prompt=0, waiting=[])
    with pytest.raises(LateError):
        admission.admit(load, 1, 1.0, 0.02, 1e6)
    for _ in range(200):
        admission.ended(20, 100)
    assert admission.ratio == pytest.approx(0.2, abs=0.01)
    admission.admit(load, 1, 1.0, 0.02, 1e6)
