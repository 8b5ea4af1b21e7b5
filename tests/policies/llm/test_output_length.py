"""Lengths of answers: what there is to learn is learned, and what there is not does no harm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.llm.output_length import LengthPredictor, OutputLengths

MOST = 4096

Truth = Callable[[int, int], float]
"""Adapter and prompt -> the median length of the answer."""


def median_error(
    truth: Truth, spread: float = 0.2, requests: int = 1500, adapters: int = 20, after: int = 1000, seed: int = 0
) -> float:
    """Of the last predictions in a stream, the median of |log2 of predicted to the true median|."""
    random = np.random.default_rng(seed)
    lengths: OutputLengths[int] = OutputLengths()
    errors = []
    for request in range(requests):
        adapter, prompt = int(random.integers(adapters)), int(random.lognormal(6, 1)) + 1
        median = truth(adapter, prompt)
        tokens = max(1, min(MOST, round(float(median * np.exp(random.normal(0, spread))))))
        predicted = lengths.predict(adapter, prompt, MOST)
        lengths.observe(adapter, prompt, tokens, predicted)
        if request >= after:
            errors.append(abs(np.log2(predicted / median)))
    return float(np.median(errors))


@pytest.mark.parametrize(
    ("truth", "within"),
    [
        (lambda adapter, prompt: 100, 0.1),
        (lambda adapter, prompt: 8 * 1.35**adapter, 0.15),
        (lambda adapter, prompt: 20 + prompt / 4, 0.2),
        (lambda adapter, prompt: 400 if prompt < 500 else 30, 0.15),
        (lambda adapter, prompt: (10 if prompt < 500 else 100) * (1 + adapter % 4), 0.25),
    ],
    ids=["all alike", "by adapter", "by prompt", "two kinds of prompts", "by both"],
)
def test_what_the_length_depends_on_is_learned(truth: Truth, within: float) -> None:
    assert median_error(truth) <= within


def test_an_adapter_is_known_after_a_few_answers() -> None:
    lengths: OutputLengths[str] = OutputLengths()
    for _ in range(300):
        lengths.observe("usual", 100, 400, 400)
    assert lengths.predict("new", 100, MOST) == pytest.approx(400, rel=0.15), "until then it is like the others"
    for _ in range(5):
        lengths.observe("new", 100, 20, 20)
    assert lengths.predict("new", 100, MOST) == pytest.approx(20, rel=0.2)
    assert lengths.predict("usual", 100, MOST) == pytest.approx(400, rel=0.15)
    assert lengths.predict(None, 100, MOST) == pytest.approx(400, rel=0.15)


def test_adapters_that_differ_in_nothing_cost_little() -> None:
    """Twenty adapters, of which none is different, against one."""

    def bimodal(adapter: int, prompt: int) -> float:
        return 40 if prompt % 3 else 500

    def share_wrong(adapters: int) -> float:
        random = np.random.default_rng(1)
        lengths: OutputLengths[int] = OutputLengths()
        for _ in range(1500):
            adapter, prompt = int(random.integers(adapters)), int(random.integers(3, 60))
            tokens = round(float(bimodal(adapter, prompt) * np.exp(random.normal(0, 0.3)))) + 1
            lengths.observe(adapter, prompt, tokens, lengths.predict(adapter, prompt, MOST))
        return 1 - lengths.accuracy

    assert share_wrong(20) <= share_wrong(1) + 0.05


def test_new_ways_replace_old_ones() -> None:
    lengths: OutputLengths[str] = OutputLengths()
    for _ in range(2000):
        lengths.observe("a", 100, 400, 400)
    for _ in range(200):
        lengths.observe("a", 100, 50, 50)
    assert lengths.predict("a", 100, MOST) == pytest.approx(50, rel=0.2)


def test_the_median_of_any_spread() -> None:
    lengths: OutputLengths[str] = OutputLengths()
    for tokens in np.random.default_rng(0).permutation([*([10] * 40), *([100] * 30), *([1000] * 30)]).tolist():
        lengths.observe("a", 100, tokens, tokens)
    assert lengths.predict("a", 100, MOST) == pytest.approx(100, rel=0.2)
    assert lengths.predict("a", 100, 60) == 60


def test_before_anything_is_known() -> None:
    lengths: OutputLengths[str] = OutputLengths()
    assert lengths.predict("a", 100, 16) == 16
    assert 16 < lengths.predict(None, 0, MOST) < MOST
    assert (lengths.accuracy, lengths.error) == (0.0, 0.0)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 3), st.integers(0, 200_000), st.integers(1, 200_000), st.integers(1, 9999)
        ),
        max_size=30,
    )
)
def test_predictions_are_always_possible(stream: list[tuple[int | None, int, int, int]]) -> None:
    lengths: OutputLengths[int] = OutputLengths(contexts=20)
    for adapter, prompt, tokens, most in stream:
        predicted = lengths.predict(adapter, prompt, most)
        assert 1 <= predicted <= most
        lengths.observe(adapter, prompt, tokens, predicted)
        assert lengths.predict(adapter, prompt, 1) == 1
        assert len(lengths) <= 20


def test_memory_is_bounded_and_what_is_used_is_remembered() -> None:
    lengths: OutputLengths[int] = OutputLengths(contexts=500)
    for request in range(3000):
        lengths.observe(request, 100, 400, 400)
        lengths.observe(-1, 100, 20, 20)
    assert len(lengths) == 500
    assert lengths.predict(-1, 100, MOST) == pytest.approx(20, rel=0.2)
    assert lengths.predict(0, 100, MOST) > 100, "forgotten, so like the others"


def test_accuracy_and_error() -> None:
    lengths: OutputLengths[str] = OutputLengths()
    for tokens, predicted in [(64, 127), (64, 63), (100, 100), (10, 5)]:
        lengths.observe("a", 10, tokens, predicted)
    assert lengths.accuracy == pytest.approx(0.5, abs=0.01)
    assert lengths.error == pytest.approx((63 / 64 + 1 / 64 + 0 + 0.5) / 4, rel=0.01)


def test_it_is_a_length_predictor() -> None:
    predictor: LengthPredictor[str] = OutputLengths()
    assert predictor.predict(None, 10, 20) <= 20


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="contexts must be at least 1, got 0"):
        OutputLengths(contexts=0)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        OutputLengths[str]().observe("a", 10, 0, 5)
