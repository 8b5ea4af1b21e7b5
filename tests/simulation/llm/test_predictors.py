"""Who says how long answers will be: an oracle that errs as often as it is said to, and ours."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.simulation.llm.outcome import Request
from pliant.simulation.llm.predictors import NoisyOracle, Online


def test_an_oracle_is_right_as_often_as_it_should_be() -> None:
    requests = [Request(0.0, 1, output, 0) for output in range(1, 4001)]
    for accuracy in (1.0, 0.8, 0.0):
        oracle = NoisyOracle(requests, accuracy, seed=1)
        right = np.mean([oracle.predict(key) == request.output for key, request in enumerate(requests)])
        assert right == pytest.approx(accuracy, abs=0.03)


def test_our_predictor_is_not_told_what_it_is_asked_for() -> None:
    requests = [Request(float(index), 50, 7 if index < 100 else 300, 0) for index in range(101)]
    predictor = Online(requests)
    for key in range(100):
        predicted = predictor.predict(key)
        assert 1 <= predicted <= 300
        predictor.observe(key)
    assert predictor.predict(100) < 30
