"""Temperatures and calibration errors, against plain loops and against what made the logits (Tabi §4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.cascade.calibration import (
    HIGHEST,
    LOWEST,
    MIN_SAMPLES,
    Floats,
    Integers,
    TooFewSamplesError,
    expected_calibration_error,
    fit_temperature,
)
from pliant.policies.encoder.confidence import confidence, softmax

seeds = st.integers(0, 2**32 - 1)


def sampled(seed: int, texts: int, classes: int, temperature: float) -> tuple[Floats, Integers]:
    """Logits whose labels are drawn from their softmax at `temperature`."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(texts, classes)) * 4
    chances = softmax(logits, temperature).cumsum(axis=1)
    labels = (random.random((texts, 1)) > chances[:, :-1]).sum(axis=1)
    return logits, labels


def plain_softmax(logits: Sequence[float], temperature: float) -> list[float]:
    powers = [math.exp(logit / temperature) for logit in logits]
    return [power / sum(powers) for power in powers]


def plain_loss(logits: Floats, labels: Integers, temperature: float) -> float:
    """Negative log-likelihood of n labels and half another one, which is either of the two likeliest of any text."""
    texts, total = len(logits), 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        logs = [math.log(value) for value in plain_softmax(row, temperature)]
        total -= (texts * logs[label] + 0.5 * sum(sorted(logs)[-2:]) / 2) / (texts + 0.5)
    return total / texts


@given(seed=seeds, classes=st.integers(2, 6), temperature=st.floats(0.5, 5))
def test_softmax_and_confidence_are_those_of_a_plain_loop(seed: int, classes: int, temperature: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(4, classes)) * 5
    expected = [plain_softmax(row, temperature) for row in logits.tolist()]
    assert np.allclose(softmax(logits, temperature), expected)
    assert np.allclose(confidence(softmax(logits, temperature)), [max(row) for row in expected])
    assert (softmax(logits, temperature).argmax(axis=1) == logits.argmax(axis=1)).all()


def test_softmax_of_huge_logits_is_finite() -> None:
    assert softmax([1e6, 0.0, -1e6]).tolist() == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="above 0"):
        softmax([1.0, 2.0], 0.0)


@settings(max_examples=25)
@given(seed=seeds, classes=st.integers(2, 5), temperature=st.floats(0.4, 4))
def test_no_temperature_near_the_fitted_one_is_likelier(seed: int, classes: int, temperature: float) -> None:
    logits, labels = sampled(seed, 60, classes, temperature)
    fitted = fit_temperature(logits, labels)
    least = plain_loss(logits, labels, fitted)
    for other in (fitted * 0.98, fitted * 1.02, 0.5, 1.0, 2.0, 8.0):
        assert least <= plain_loss(logits, labels, other) + 1e-9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_that_made_the_labels_is_found_and_calibrates(temperature: float) -> None:
    logits, labels = sampled(1, 6000, 8, temperature)
    fitted = fit_temperature(logits, labels)
    assert fitted == pytest.approx(temperature, rel=0.06)
    fresh, truth = sampled(2, 6000, 8, temperature)
    right = fresh.argmax(axis=1) == truth
    before = expected_calibration_error(confidence(softmax(fresh)), right)
    after = expected_calibration_error(confidence(softmax(fresh, fitted)), right)
    assert after < 0.02
    if temperature != 1:
        assert before > 3 * after


@given(seed=seeds, scale=st.floats(0.01, 100), shift=st.floats(-50, 50))
@settings(max_examples=25)
def test_temperature_scales_with_logits_and_does_not_care_for_a_shift(seed: int, scale: float, shift: float) -> None:
    logits, labels = sampled(seed, 80, 3, 1.0)
    fitted = fit_temperature(logits, labels)
    expected = min(max(fitted * scale, LOWEST), HIGHEST)
    assert fit_temperature(logits * scale + shift, labels) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("texts", [MIN_SAMPLES, 500])
def test_all_right_answers_leave_room_for_doubt(texts: int) -> None:
    random = np.random.default_rng(3)
    labels = random.integers(4, size=texts)
    logits = random.uniform(1, 3, size=(texts, 1)) * (np.arange(4) == labels[:, None])
    fitted = fit_temperature(logits, labels)
    assert LOWEST < fitted < 1
    doubt = 1 - confidence(softmax(logits, fitted)).mean()
    assert 0.2 / texts < doubt < 2 / texts


@pytest.mark.parametrize("texts", [100, 300])
def test_many_classes_do_not_make_a_model_doubt_more(texts: int) -> None:
    """Classes that it finds absurd do not count: few texts tell the temperature about as well as many."""
    fitted = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        logits = 1.5 * random.normal(size=(texts, 150))
        logits[np.arange(texts), random.integers(150, size=texts)] += random.uniform(8, 20, texts)
        chances = softmax(logits).cumsum(axis=1)
        labels = (random.random((texts, 1)) > chances[:, :-1]).sum(axis=1)
        fitted.append(fit_temperature(logits, labels))
    assert np.mean(fitted) == pytest.approx(1, abs=0.05)


def test_logits_that_tell_nothing_or_the_contrary() -> None:
    labels = np.arange(60) % 3
    assert fit_temperature(np.ones((60, 3)), labels) == 1.0
    assert fit_temperature(-5.0 * np.eye(3)[labels], labels) == HIGHEST
    assert fit_temperature(1e-4 * np.eye(3)[labels], labels) == LOWEST


def test_what_cannot_be_fitted_is_said() -> None:
    logits, labels = sampled(0, MIN_SAMPLES, 3, 1.0)
    fit_temperature(logits, labels)
    with pytest.raises(TooFewSamplesError, match=f"at least {MIN_SAMPLES} labelled texts, got {MIN_SAMPLES - 1}"):
        fit_temperature(logits[1:], labels[1:])
    with pytest.raises(ValueError, match="from 0 to 2, got 1 to 3"):
        fit_temperature(logits, labels + 1)
    with pytest.raises(ValueError, match="1 are not"):
        fit_temperature(np.where(np.arange(3 * MIN_SAMPLES).reshape(-1, 3) == 5, np.inf, logits), labels)
    with pytest.raises(ValueError, match="classes"):
        fit_temperature(logits, labels[1:])
    with pytest.raises(ValueError, match="classes"):
        fit_temperature(logits[:, :1], labels * 0)


@given(
    answers=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40),
    bins=st.integers(1, 20),
)
def test_calibration_error_is_that_of_a_plain_loop(answers: list[tuple[float, bool]], bins: int) -> None:
    total = 0.0
    for index in range(bins):
        inside = [
            (sure, right)
            for sure, right in answers
            if index / bins < sure * 1.0 <= (index + 1) / bins or (index == 0 and sure == 0)
        ]
        if inside:
            accuracy = sum(right for _, right in inside) / len(inside)
            total += abs(accuracy - sum(sure for sure, _ in inside) / len(inside)) * len(inside) / len(answers)
    sure, right = zip(*answers, strict=True)
    edges = [abs(value * bins - round(value * bins)) < 1e-9 and value not in (0.0, 1.0) for value in sure]
    if not any(edges):  # which side of an edge a rounded product falls on is not the point
        assert expected_calibration_error(sure, right, bins) == pytest.approx(total, abs=1e-12)
    assert 0 <= expected_calibration_error(sure, right, bins) <= 1


def test_calibration_error_by_hand() -> None:
    assert expected_calibration_error([1.0, 1.0], [True, False]) == 0.5
    assert expected_calibration_error([0.5] * 4, [True, False] * 2) == 0
    assert expected_calibration_error([0.9, 0.1], [True, False], bins=2) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="from 0 to 1"):
        expected_calibration_error([1.5], [True])
    with pytest.raises(ValueError, match="as many"):
        expected_calibration_error([], [])
