"""What replicas of a language model carry, against a replica that is simulated step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.llm.value_curve import Lengths, Objectives, Speeds, carried, live, prompt_s, value_curve

SPEEDS = Speeds(prompt_token_s=0.0002, step_s=0.02, row_s=0.0008, slots=64)
LENGTHS = Lengths(prompt=200, answer=100)
OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.06)


def test_live_answers_are_those_of_a_replica_step_by_step() -> None:
    rate, rng = 5.0, np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, 4000)).tolist()
    now, at = 0.0, 0
    left: list[int] = []
    seen: list[tuple[float, int]] = []
    while at < len(arrivals):
        while at < len(arrivals) and arrivals[at] <= now:
            now += SPEEDS.prompt_token_s * LENGTHS.prompt
            left.append(int(LENGTHS.answer))
            at += 1
        step = SPEEDS.step_s + SPEEDS.row_s * len(left) if left else arrivals[at] - now
        now += step
        seen.append((step, len(left)))
        left = [more - 1 for more in left if more > 1]
    mean = sum(step * count for step, count in seen) / sum(step for step, _ in seen)
    assert live(SPEEDS, LENGTHS, rate) == pytest.approx(mean, rel=0.1)


@given(st.floats(1e-5, 1e-3), st.floats(0.001, 0.05), st.floats(1e-5, 0.005), st.integers(1, 128))
@settings(max_examples=80)
def test_what_is_carried_keeps_the_objectives_and_no_more_would(
    prompt_token_s: float, step_s: float, row_s: float, slots: int
) -> None:
    speeds = Speeds(prompt_token_s, step_s, row_s, slots)
    each = carried(speeds, LENGTHS, OBJECTIVES)

    def keeps(rate: float) -> bool:
        answers = live(speeds, LENGTHS, rate)
        return answers <= slots and answers / (rate * LENGTHS.answer) <= OBJECTIVES.tpot_s

    if each > 1e-6:
        assert keeps(0.999 * each)
        assert not keeps(1.001 * each)


def test_tokens_rise_to_the_demand() -> None:
    curve = value_curve(SPEEDS, LENGTHS, OBJECTIVES, 40.0, 12, spread=0.2)
    each = carried(SPEEDS, LENGTHS, OBJECTIVES)
    assert (np.diff(curve) >= 0).all()
    assert curve[0] == 0
    assert curve[1] <= 1.001 * each * LENGTHS.answer
    assert curve[12] == pytest.approx(4000, rel=0.01)


def test_adapters_and_short_patience_cost() -> None:
    slow = Speeds(0.0002, 0.02, 0.0008, 64, adapter_load_s=0.5)
    missing = Lengths(200, 100, adapter_misses=1.0)
    assert prompt_s(slow, missing) == pytest.approx(0.56)
    assert not value_curve(slow, missing, Objectives(0.5, 0.06), 4.0, 3).any()
    assert value_curve(slow, missing, OBJECTIVES, 4.0, 3)[1] <= value_curve(slow, LENGTHS, OBJECTIVES, 4.0, 3)[1]
