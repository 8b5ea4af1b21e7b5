"""When a small language model answers: as brute force has it, and never worse than promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.escalation import CUTOFFS, TOKENS, Answered, Rule, certified, escalation

RULES = [Rule(tokens, signal, cutoff) for tokens in TOKENS for signal in ("mean", "least") for cutoff in CUTOFFS]
PROBABILITY = st.floats(0.01, 1.0)


def prompts(seed: int, count: int, honest: bool = True) -> list[Answered]:
    """Of a small model that is as often worse than the large one as it is unsure; or whose confidence says nothing."""
    random = np.random.default_rng(seed)
    found = []
    for sure in random.beta(4, 1, count):
        logprobs = np.log(np.clip(sure + random.normal(0, 0.02, random.integers(1, 24)), 0.01, 1.0))[: max(TOKENS)]
        worse = random.random() > sure and sure < 0.97 if honest else random.random() < 0.3
        found.append(Answered([float(each) for each in logprobs], worse, int(random.integers(1, 65))))
    return found


def test_an_answer_that_ends_at_once_says_nothing() -> None:
    assert [rule.sure([]) for rule in RULES] == [rule.cutoff == 0 for rule in RULES]
    found = escalation([Answered([], index % 10 == 0, 5) for index in range(1000)], 0.01)
    assert found.rule is None


@given(st.lists(PROBABILITY, min_size=1, max_size=20), st.sampled_from(RULES))
def test_confidence_is_of_the_first_tokens(probabilities: list[float], rule: Rule) -> None:
    logprobs = [math.log(each) for each in probabilities]
    looked = probabilities[: rule.tokens]
    wanted = min(looked) if rule.signal == "least" else math.prod(looked) ** (1 / len(looked))
    assert rule.confidence(logprobs) == pytest.approx(wanted)
    assert rule.sure(logprobs) == (rule.confidence(logprobs) >= rule.cutoff)


@given(st.integers(0, 1000), st.integers(1, 400), st.floats(0.005, 0.3), st.floats(1e-4, 0.2))
def test_what_is_certified_is_unlikely_to_break_the_promise(seed: int, count: int, loss: float, part: float) -> None:
    random = np.random.default_rng(seed)
    sure, worse = random.random(count), random.random(count) < random.random() * 0.2
    budget, wanted = part, []
    for cutoff in CUTOFFS:
        bad = sum(1 for one, is_worse in zip(sure, worse, strict=True) if one >= cutoff and is_worse)
        chance = sum(math.comb(count, k) * loss**k * (1 - loss) ** (count - k) for k in range(bad + 1))
        if chance <= budget:
            wanted.append(cutoff)
            budget += part
        else:
            budget = part
    assert certified(sure, worse, loss, part) == wanted


@pytest.mark.parametrize("seed", range(5))
def test_the_rule_is_the_best_of_all_that_are_certified(seed: int) -> None:
    answered = prompts(seed, 1500)
    found = escalation(answered, 0.05)
    assert found.rule
    assert 0.02 < found.early < 1
    part = 0.05 / (5 * len(CUTOFFS))
    worse = [one.worse for one in answered]
    total = sum(one.large_tokens for one in answered)
    saved = {}
    for rule in RULES:
        sure = [rule.confidence(one.logprobs) for one in answered]
        if rule.cutoff in certified(sure, worse, 0.05, part):
            early = [one for one in answered if rule.sure(one.logprobs)]
            saved[rule] = sum(one.large_tokens for one in early) / total
    assert found.saved == pytest.approx(saved[found.rule])
    assert max(saved.values()) - found.saved <= 0.01
    assert all(rule.tokens >= found.rule.tokens for rule in saved if saved[rule] >= max(saved.values()) - 0.01)
    early = [one for one in answered if found.rule.sure(one.logprobs)]
    assert (found.early, found.worse) == (len(early) / 1500, sum(one.worse for one in early) / 1500)


def test_the_promise_is_kept_on_prompts_to_come() -> None:
    """In 60 draws from which a rule is chosen, of 20,000 prompts more."""
    later = prompts(99, 20_000)
    broken = 0
    for seed in range(60):
        if rule := escalation(prompts(seed, 800), 0.05).rule:
            broken += sum(one.worse and rule.sure(one.logprobs) for one in later) > 0.05 * len(later)
    assert broken <= 3


def test_a_confidence_that_says_nothing_lets_the_small_model_answer_nothing() -> None:
    found = escalation(prompts(0, 1500, honest=False), 0.01)
    assert (found.rule, found.early, found.saved) == (None, 0, 0)
    assert escalation([Answered([math.log(0.999)], index % 3 == 0, 10) for index in range(1500)], 0.01).rule is None


def test_a_small_model_that_is_hardly_ever_sure_does_not_begin() -> None:
    seldom = [Answered([math.log(0.999 if index < 20 else 0.01)], index >= 20, 10) for index in range(1500)]
    assert escalation(seldom, 0.01).rule is None
    often = [Answered([math.log(0.999 if index < 40 else 0.01)], index >= 40, 10) for index in range(1500)]
    assert escalation(often, 0.01).early == pytest.approx(40 / 1500)


def test_with_too_few_prompts_it_says_how_many_are_needed() -> None:
    always = Answered([0.0], False, 10)
    few = escalation([always] * 100, 0.01)
    assert (few.rule, few.early, few.prompts) == (None, 0, 100)
    assert few.fewest > 100
    enough = escalation([always] * few.fewest, 0.01)
    assert enough.rule
    assert (enough.rule.tokens, enough.early, enough.saved) == (1, 1, 1)


@pytest.mark.parametrize(
    ("answered", "loss", "delta"),
    [
        ([], 0.01, 0.05),
        ([Answered([0.0], False, 1)], 0.0, 0.05),
        ([Answered([0.0], False, 1)], 0.01, 1.0),
    ],
)
def test_what_makes_no_sense_is_refused(answered: list[Answered], loss: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"needs labelled prompts|must be between"):
        escalation(answered, loss, delta)
