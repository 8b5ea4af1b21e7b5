"""Certified cut-offs keep their promise as often as they say, and are not needlessly careful."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.candidates import CUTOFFS
from pliant.policies.cascade.cascade import reroute_probability
from pliant.policies.cascade.conformal_cutoff import binomial_tail, conformal_cutoffs

EPSILON, DELTA = 0.05, 0.1


@given(trials=st.integers(0, 60), data=st.data(), probability=st.floats(0.001, 0.999))
def test_the_binomial_tail_is_exact(trials: int, data: st.DataObject, probability: float) -> None:
    successes = data.draw(st.integers(0, trials))
    expected = sum(
        comb(trials, count) * probability**count * (1 - probability) ** (trials - count)
        for count in range(successes + 1)
    )
    assert binomial_tail(successes, trials, probability) == pytest.approx(expected, rel=1e-9)


def test_the_binomial_tail_of_many_trials() -> None:
    assert binomial_tail(200_000, 1_000_000, 0.2) == pytest.approx(0.5, abs=0.01)
    assert binomial_tail(100, 1_000_000, 0.2) == 0
    with pytest.raises(ValueError, match="successes"):
        binomial_tail(3, 2, 0.5)


def texts(random: np.random.Generator, number: int, disagreement: float) -> tuple[Floats, Floats, Floats]:
    """Confidences, draws, and how likely each text's answer differs: less often, the surer the small model is."""
    sure = 1 - random.beta(0.6, 2.0, number)
    return sure, random.random(number), np.clip(disagreement * (1 - sure) / 0.23, 0, 1)


@pytest.mark.parametrize("disagreement", [0.09, 0.15])
@pytest.mark.parametrize("slope", [10.0, 40.0])
def test_no_certified_cutoff_breaks_its_promise_more_often_than_delta(disagreement: float, slope: float) -> None:
    random = np.random.default_rng(0)
    sure, numbers, chances = texts(random, 400_000, disagreement)
    risk = {}
    for cutoff in CUTOFFS:
        early = numbers >= reroute_probability(sure, cutoff, slope)
        risk[cutoff] = chances[early].mean()
    assert min(risk.values()) < EPSILON < max(risk.values()), "some hold and some do not"
    trials, broken, certified = 400, 0, 0
    for _ in range(trials):
        sure, numbers, chances = texts(random, 600, disagreement)
        found = conformal_cutoffs(sure, numbers, random.random(600) < chances, EPSILON, DELTA, slope=slope)
        broken += any(risk[cutoff] > EPSILON for cutoff in found.certified)
        certified += bool(found.certified)
    assert broken / trials <= DELTA + 2 * (DELTA * (1 - DELTA) / trials) ** 0.5
    assert certified / trials > 0.5


def test_at_the_edge_the_promise_is_broken_at_most_as_often_as_delta() -> None:
    """Every cut-off answers the same texts early, and these disagree a little more often than they may."""
    random = np.random.default_rng(1)
    trials = 1000
    wrong = [
        bool(conformal_cutoffs(np.ones(300), np.full(300, 0.5), random.random(300) < 0.0505, 0.05, 0.2).certified)
        for _ in range(trials)
    ]
    assert np.mean(wrong) <= 0.2 + 2 * 0.4 / trials**0.5


@given(
    seed=st.integers(0, 1000),
    cutoffs=st.lists(st.floats(0.05, 0.99), min_size=1, max_size=6, unique=True),
)
def test_it_is_the_fallback_procedure(seed: int, cutoffs: list[float]) -> None:
    random = np.random.default_rng(seed)
    sure, numbers, chances = texts(random, 300, 0.05)
    differ = random.random(300) < chances
    found = conformal_cutoffs(sure, numbers, differ, EPSILON, DELTA, cutoffs)
    expected, budget = [], 0.0
    for cutoff in sorted(cutoffs)[::-1]:
        budget += DELTA / len(cutoffs)
        early = [index for index in range(300) if numbers[index] >= float(reroute_probability(sure[index], cutoff))]
        wrong = sum(bool(differ[index]) for index in early)
        if early and binomial_tail(wrong, len(early), EPSILON) <= budget:
            expected.append(cutoff)
        else:
            budget = 0.0
    assert found.certified == tuple(expected)


def test_what_was_certified_is_backed_by_counts() -> None:
    random = np.random.default_rng(2)
    sure, numbers, chances = texts(random, 4000, 0.05)
    differ = random.random(4000) < chances
    found = conformal_cutoffs(sure, numbers, differ, EPSILON, DELTA)
    lowest = min(found.certified)
    early = numbers >= reroute_probability(sure, lowest)
    assert (found.early, found.disagreements) == (int(early.sum()), int((early & differ).sum()))
    assert found.disagreements / found.early < EPSILON
    counts = f"{found.early} early texts, of which {found.disagreements} disagree"
    assert str(found) == f"certifies {len(found.certified)} cut-offs, from {lowest:g} up: {counts}"
    assert 0.95**found.fewest_texts <= DELTA / len(CUTOFFS) < 0.95 ** (found.fewest_texts - 1)


def test_too_few_texts_certify_nothing() -> None:
    found = conformal_cutoffs(np.ones(50), np.full(50, 0.9), np.zeros(50), 0.01)
    assert (found.certified, found.early, found.disagreements) == ((), 50, 0)
    assert found.fewest_texts > 50
    assert str(found) == (
        f"no cut-off can be certified: needs about {found.fewest_texts} early texts that all agree, had 50 early "
        "texts, of which 0 disagree"
    )
    certain = conformal_cutoffs(np.ones(50), np.zeros(50), np.zeros(50), 0.01)
    assert (certain.certified, certain.early) == ((), 0)
    enough = found.fewest_texts
    assert conformal_cutoffs(np.ones(enough), np.full(enough, 0.9), np.zeros(enough), 0.01).certified == CUTOFFS


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="as many"):
        conformal_cutoffs([0.5], [0.5, 0.5], [True], 0.1)
    for epsilon, delta in ((0.0, 0.1), (0.1, 1.0)):
        with pytest.raises(ValueError, match="between 0 and 1"):
            conformal_cutoffs([0.5], [0.5], [True], epsilon, delta)
