"""Confidence in scores: it is how often the truth lies within the tolerance (Tabi §4.1)."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.policies.cascade.calibration import MIN_SAMPLES, Floats, TooFewSamplesError, expected_calibration_error
from pliant.policies.cascade.score_calibration import ScoreCalibration


def scored(seed: int, texts: int, heavy: bool) -> tuple[Floats, Floats]:
    """Scores from 0 to 5, hardest to tell in the middle, with normal or heavy-tailed errors."""
    random = np.random.default_rng(seed)
    scores = random.uniform(0, 5, texts)
    widths = 0.1 + 0.25 * scores * (5 - scores) / 6.25
    noise = random.standard_t(2, texts) if heavy else random.normal(size=texts)
    return scores, scores + widths * noise


@pytest.mark.parametrize("heavy", [False, True])
def test_confidence_is_the_share_within_the_tolerance(heavy: bool) -> None:
    fitted = ScoreCalibration.fit(*scored(0, 3000, heavy), tolerance=0.25)
    scores, targets = scored(1, 6000, heavy)
    sure = fitted.confidence(scores)
    assert expected_calibration_error(sure, np.abs(scores - targets) <= 0.25) < 0.04
    assert sure[np.abs(scores - 2.5) < 0.5].mean() < sure[np.abs(scores - 2.5) > 2].mean() - 0.1


def test_a_wider_tolerance_is_surer_and_nothing_is_certain() -> None:
    scores, targets = scored(2, 400, False)
    sure = [ScoreCalibration.fit(scores, targets, tolerance).confidence(scores) for tolerance in (0.1, 0.3, 100.0)]
    assert (sure[0] <= sure[1]).all()
    assert np.allclose(sure[2], 400 / 401)


def test_a_perfect_model_is_sure() -> None:
    scores, _ = scored(3, MIN_SAMPLES, False)
    fitted = ScoreCalibration.fit(scores, scores, 0.1)
    assert float(fitted.confidence(2.0)) == MIN_SAMPLES / (MIN_SAMPLES + 1)


def test_what_cannot_be_fitted_is_said() -> None:
    scores, targets = scored(4, MIN_SAMPLES - 1, False)
    with pytest.raises(TooFewSamplesError, match=f"at least {MIN_SAMPLES} labelled texts, got {MIN_SAMPLES - 1}"):
        ScoreCalibration.fit(scores, targets, 0.1)
    with pytest.raises(ValueError, match="tolerance above 0"):
        ScoreCalibration.fit(scores, targets, 0.0)
    with pytest.raises(ValueError, match="shapes"):
        ScoreCalibration.fit(scores, targets[1:], 0.1)
