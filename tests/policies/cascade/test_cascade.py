"""Re-routing and voting, against equations 4 and 6 written out, and the decisions made live (Tabi §4.1, §4.3)."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.cascade import (
    SLOPE,
    Cascade,
    draw,
    draws,
    ensemble_weights,
    reroute_probability,
    sure_from,
    vote,
)
from pliant.policies.encoder.confidence import softmax
from pliant.texts import Pair

shares = st.floats(0, 1)
slopes = st.floats(0.1, 200)
logits = st.lists(st.floats(-30, 30), min_size=3, max_size=3)


def equation_4(sure: float, cutoff: float, slope: float) -> float:
    if sure <= cutoff:
        return 1.0
    norm = (sure - cutoff) / (1 - cutoff) - 1 / 2
    return 1 / (1 + math.exp(slope * norm))


@given(sure=shares, cutoff=shares, slope=slopes)
def test_reroute_probability_is_equation_4(sure: float, cutoff: float, slope: float) -> None:
    probability = float(reroute_probability(sure, cutoff, slope))
    assert probability == pytest.approx(equation_4(sure, cutoff, slope), rel=1e-9, abs=1e-300)
    assert 0 <= probability <= 1


@given(sure=st.tuples(shares, shares), cutoffs=st.tuples(shares, shares), slope=slopes)
def test_it_falls_with_confidence_and_rises_with_the_cutoff(
    sure: tuple[float, float], cutoffs: tuple[float, float], slope: float
) -> None:
    less, more = (reroute_probability(value, cutoffs[0], slope) for value in sorted(sure))
    assert less >= more
    lower, higher = (reroute_probability(sure[0], value, slope) for value in sorted(cutoffs))
    assert lower <= higher + 1e-12


def test_the_ends_of_the_curve() -> None:
    sure = np.linspace(0, 1, 11)
    assert (reroute_probability(sure, 1.0) == 1).all()
    assert reroute_probability(0.9, 0.9) == 1
    assert reroute_probability(0.95, 0.9) == pytest.approx(0.5)
    assert reroute_probability(0.5, 0.0) == pytest.approx(0.5)
    assert reroute_probability(0.0, 0.0) == 1
    assert reroute_probability(1.0, 0.9) == pytest.approx(1 / (1 + math.exp(SLOPE / 2)))
    assert reroute_probability(1.0, 0.5, 1e6) == 0
    for cutoff, slope in ((1.1, 1.0), (-0.1, 1.0), (0.5, 0.0)):
        with pytest.raises(ValueError, match="cut-off must be from 0 to 1"):
            reroute_probability(0.5, cutoff, slope)


@given(seed=st.integers(), text=st.text(), level=st.integers(0, 3))
def test_draws_are_numbers_from_0_to_1_that_repeat(seed: int, text: str, level: int) -> None:
    number = draw(seed, text, level)
    assert 0 <= number < 1
    assert number == draw(seed, text, level)
    assert number != draw(seed + 1, text, level) != draw(seed, text, level + 1)


def test_draws_stay_as_they_are_in_every_process_and_release() -> None:
    assert draw(7, "größe", 0) == 0.7831900321837857
    assert 0 <= draw(0, "\ud800", 0) < 1, "half a surrogate pair is a text too"


def test_draws_are_uniform_and_independent_by_level() -> None:
    texts = [f"text {number}" for number in range(20_000)]
    first, second = draws(0, texts, 0), draws(0, texts, 1)
    counts = np.histogram(first, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45, "chi square of 19 degrees of freedom"
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert first[:3].tolist() == [draw(0, text, 0) for text in texts[:3]]


@given(rows=st.lists(st.tuples(logits, st.floats(0, 5, allow_subnormal=False)), min_size=1, max_size=3))
def test_the_vote_is_equation_6(rows: list[tuple[list[float], float]]) -> None:
    weights = [weight for _, weight in rows]
    outputs = [softmax(row) for row, _ in rows]
    if sum(weights) <= 0:
        with pytest.raises(ValueError, match="weight"):
            vote(outputs, weights)
        return
    expected = [
        sum(weight * output[label] for weight, output in zip(weights, outputs, strict=True)) / sum(weights)
        for label in range(3)
    ]
    assert np.allclose(vote(outputs, weights), expected)
    table = [np.stack([output, output[::-1]]) for output in outputs]
    assert np.allclose(vote(table, weights), [expected, expected[::-1]])


def test_a_vote_of_unlike_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="same classes"):
        vote([np.ones(2) / 2, np.ones(3) / 3], [1, 1])
    with pytest.raises(ValueError, match="each of 2 levels"):
        vote([np.ones(2), np.ones(2)], [1])


@given(texts=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.floats(0, 1)), min_size=1, max_size=20))
def test_weights_are_proportional_to_accuracy_on_what_was_rerouted(
    texts: list[tuple[bool, bool, bool, float]],
) -> None:
    accuracies = [sum(text[3] for text in texts if text[level]) for level in range(3)]
    right = [[text[level] for text in texts] for level in range(3)]
    weights = ensemble_weights(right, [text[3] for text in texts])
    assert sum(weights) == pytest.approx(1)
    if sum(accuracies) > 0:
        assert weights == pytest.approx([accuracy / sum(accuracies) for accuracy in accuracies])
    else:
        assert weights == pytest.approx([1 / 3] * 3)


def three_levels(seed: int = 0) -> Cascade:
    return Cascade((2.0, 1.5, 1.0), (0.8, 0.9), ((1.0,), (0.4, 0.6), (0.2, 0.3, 0.5)), seed=seed)


@given(text=st.text(), row=logits, level=st.integers(0, 2), seed=st.integers(0, 9))
def test_a_decision_is_the_draw_against_equation_4(text: str, row: list[float], level: int, seed: int) -> None:
    cascade = three_levels(seed)
    [said] = cascade.calibrated([row], level)
    assert said == pytest.approx(softmax(row, cascade.temperatures[level]))
    probability = 0.0 if level == 2 else equation_4(max(said), cascade.cutoffs[level], SLOPE)
    assert cascade.goes_on(text, level, said) == (draw(seed, text, level) < probability)


@given(row=logits, text=st.text())
def test_with_a_cutoff_of_1_nothing_returns_early(row: list[float], text: str) -> None:
    one, two = Cascade((1.0,), (), ((1.0,),)), Cascade((0.01, 1.0), (1.0,), ((1.0,), (0.5, 0.5)))
    assert two.goes_on(text, 0, two.calibrated([row])[0])
    assert not one.goes_on(text, 0, one.calibrated([row])[0])


def test_any_order_and_number_of_requests_at_once_routes_alike() -> None:
    random = np.random.default_rng(0)
    requests = [(f"text {number}", random.normal(size=3) * 6) for number in range(300)]

    def goes_on(request: tuple[str, np.ndarray[tuple[int], np.dtype[np.float64]]], seed: int = 1) -> bool:
        cascade = three_levels(seed)
        return cascade.goes_on(request[0], 0, cascade.calibrated(request[1][None])[0])

    alone = [goes_on(request) for request in requests]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(goes_on, reversed(requests))) == alone[::-1]
    assert 0 < sum(alone) < 300
    assert [goes_on(request, 2) for request in requests] != alone


@given(number=st.floats(0, 1, exclude_max=True), cutoff=shares, slope=slopes, sure=shares)
def test_a_text_stops_from_one_confidence_on(number: float, cutoff: float, slope: float, sure: float) -> None:
    bound = sure_from(number, cutoff, slope)
    assert bound > cutoff
    if abs(sure - bound) > 1e-9:
        assert (number < reroute_probability(sure, cutoff, slope)) == (sure < bound)


def test_a_cascade_knows_how_sure_a_text_must_be() -> None:
    cascade = three_levels()
    texts = [f"text {number}" for number in range(200)]
    rows = np.random.default_rng(0).normal(size=(200, 3)) * 6
    for level in (0, 1):
        said = [cascade.calibrated(row[None], level)[0] for row in rows]
        going = [cascade.goes_on(text, level, one) for text, one in zip(texts, said, strict=True)]
        bounds = [cascade.sure_from(text, level) for text in texts]
        assert going == [max(one) < bound for one, bound in zip(said, bounds, strict=True)]
        assert 0 < sum(going) < 200


def test_the_levels_that_read_a_text_vote() -> None:
    cascade = three_levels()
    rows = [[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.0, 3.0, 0.0]]
    outputs = [softmax(row, temperature) for row, temperature in zip(rows, cascade.temperatures, strict=True)]
    said = cascade.calibrated(rows)
    assert np.allclose(said, outputs)
    assert np.allclose(cascade.vote(said[:1]), outputs[0])
    assert np.allclose(cascade.vote(said[:2]), 0.4 * outputs[0] + 0.6 * outputs[1])
    assert np.allclose(cascade.vote(said), 0.2 * outputs[0] + 0.3 * outputs[1] + 0.5 * outputs[2])
    assert cascade.vote(said).sum() == pytest.approx(1)
    assert np.allclose(said, outputs), "a vote changes nothing of what levels said"
    for wrong in ([], [*said, said[0]]):
        with pytest.raises(ValueError, match="1 to 3 levels vote, got"):
            cascade.vote(wrong)


def test_a_cascade_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="2 levels need 1 cut-offs"):
        Cascade((1.0, 1.0), (), ((1.0,), (0.5, 0.5)))
    with pytest.raises(ValueError, match="weights for 1 to 2"):
        Cascade((1.0, 1.0), (0.9,), ((0.5, 0.5), (1.0,)))
    with pytest.raises(ValueError, match="above 0"):
        Cascade((1.0, 0.0), (0.9,), ((1.0,), (0.5, 0.5)))
    with pytest.raises(ValueError, match="cut-off"):
        Cascade((1.0, 1.0), (1.9,), ((1.0,), (0.5, 0.5)))


def test_a_pair_has_draws_of_its_own() -> None:
    pair = Pair("one", "other")
    assert draw(0, pair, 0) == draw(0, Pair("one", "other"), 0)
    assert (
        len({draw(0, text, 0) for text in (pair, Pair("other", "one"), Pair("oneother", ""), "one", "oneother")}) == 5
    )
