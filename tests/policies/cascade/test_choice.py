"""The fastest candidate that meets what was asked, or an error that says what comes closest (Tabi §5)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.cascade.candidates import Candidate, find_candidates
from pliant.policies.cascade.cascade import reroute_probability, vote
from pliant.policies.cascade.choice import MARGIN, NoCandidateError, accurate, choose
from pliant.policies.cascade.tables import LevelProfile, Reading
from pliant.policies.encoder.confidence import confidence, softmax


def candidate(
    accuracy: float, mean_ms: float, p99_ms: float = 0.0, loss: float = 0.0, error: float = 0.002, name: str = "a"
) -> Candidate:
    seconds = mean_ms / 1000
    return Candidate(
        levels=(name, "large"),
        cutoffs=(0.9,),
        alphas=(0.0,),
        temperatures=(1.0, 1.0),
        weights=((1.0,), (0.5, 0.5)),
        slope=10.0,
        accuracy=accuracy,
        accuracy_error=2 * error,
        loss=loss,
        loss_error=error,
        mean_latency_s=seconds,
        p75_latency_s=seconds,
        p99_latency_s=(p99_ms or mean_ms) / 1000,
        shares=(0.5, 0.5),
        early_accuracy_gap=0.0,
    )


TABLE = [
    candidate(0.96, 10, 12, 0.0, 0.0, "large alone"),
    candidate(0.957, 6, 13, 0.003, name="careful"),
    candidate(0.952, 4, 14, 0.008, name="lucky"),
    candidate(0.93, 2, 8, 0.03, name="rash"),
]


def test_a_loss_must_be_kept_by_a_margin() -> None:
    assert choose(TABLE, accuracy_loss=0.01) is TABLE[1]
    assert choose(TABLE, accuracy_loss=0.01, margin=0) is TABLE[2]
    assert choose(TABLE, accuracy_loss=0.01, margin=5) is TABLE[0]
    assert choose(TABLE, accuracy_loss=0) is TABLE[0]
    assert choose(TABLE, accuracy_loss=0.2) is TABLE[3]


def test_a_target_must_be_met_by_a_margin() -> None:
    assert choose(TABLE, accuracy_target=0.95, margin=1.65) is TABLE[1]
    assert accurate(TABLE, accuracy_target=0.95, margin=1.65) == TABLE[:2]
    assert choose(TABLE, accuracy_target=0.95) is TABLE[0]
    assert choose(TABLE, accuracy_target=0.946) is TABLE[1]
    assert accurate(TABLE, accuracy_target=0.946) == TABLE[:2]
    assert accurate(TABLE, accuracy_loss=0.01, margin=1) == TABLE[:3]
    assert accurate(TABLE, accuracy_target=0.999) == []
    assert choose(TABLE, accuracy_target=0.95, margin=0) is TABLE[2]
    assert choose(TABLE, accuracy_target=0.9) is TABLE[3]


def test_the_slo_is_for_the_99th_percentile() -> None:
    assert choose(TABLE, accuracy_loss=0.2, slo_ms=12) is TABLE[3]
    assert choose(TABLE, accuracy_loss=0.01, slo_ms=12) is TABLE[0]
    with pytest.raises(
        NoCandidateError, match=r"none of 2 candidates .* slo_ms 11; closest is large alone .* 12\.0 ms"
    ):
        choose(TABLE, accuracy_loss=0.01, slo_ms=11)


def test_a_cascade_must_save_more_than_readings_differ_by() -> None:
    alone = replace(candidate(0.96, 10), levels=("large",), cutoffs=(), alphas=(), shares=(1.0,))
    for mean_ms, cascade_serves in ((9.7, True), (9.85, False), (10.2, False)):
        saving = candidate(0.959, mean_ms, loss=0.001, error=0.0)
        assert choose([saving, alone], accuracy_loss=0.01) is (saving if cascade_serves else alone)
    small = replace(candidate(0.955, 5), levels=("small",), cutoffs=(), alphas=(), shares=(1.0,))
    assert choose([small, alone, candidate(0.955, 4.95)], accuracy_target=0.9) is small


def test_what_comes_closest_is_said() -> None:
    closest = r"accuracy_target 0\.99 by 2\.7 .* large alone → large, 96\.00% ± 0\.00%"
    with pytest.raises(NoCandidateError, match=closest):
        choose(TABLE, accuracy_target=0.99)
    with pytest.raises(NoCandidateError, match=r"accuracy_loss 0\.001 .* careful .* ask for 0\.40% less"):
        choose(TABLE[1:], accuracy_loss=0.001, margin=1)
    with pytest.raises(NoCandidateError, match="profile the cascade first"):
        choose([], accuracy_loss=0.01)
    for both in ({}, {"accuracy_target": 0.9, "accuracy_loss": 0.01}):
        with pytest.raises(ValueError, match="give accuracy_target or accuracy_loss"):
            choose(TABLE, **both)


def test_other_texts_rarely_lose_more_than_promised() -> None:
    """Chosen on 400 texts at a time, and counted on all; a margin of none, or one standard error, would not do."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=20_000)
    logits = random.normal(size=(2, 20_000, 3))
    logits[:, np.arange(20_000), labels] += np.array([[2.5], [4.0]]) - random.exponential(1.0, 20_000)
    tables = softmax(1.5 * logits)
    best = float((tables[1].argmax(axis=1) == labels).mean())
    missed = {0.0: 0, 1.0: 0, MARGIN: 0}
    for _ in range(100):
        some = random.choice(20_000, 400, replace=False)
        levels = [
            LevelProfile(name, 1.0, Reading(table[some], np.full(400, seconds)))
            for name, table, seconds in zip(("small", "large"), tables, (1.0, 5.0), strict=True)
        ]
        found = find_candidates(levels, labels[some])
        for margin in missed:
            lost = best - true_accuracy(choose(found, accuracy_loss=0.01, margin=margin), tables, labels)
            missed[margin] += lost > 0.01
    assert missed[MARGIN] <= 10 < missed[1.0] < missed[0.0]


def true_accuracy(one: Candidate, tables: Floats, labels: Integers) -> float:
    chain = [tables[("small", "large").index(level)] for level in one.levels]
    onward = reroute_probability(confidence(chain[0]), one.cutoffs[0], one.slope) if one.cutoffs else 0.0
    last = vote(chain, one.weights[-1]).argmax(axis=1) == labels
    return float(((1 - onward) * (chain[0].argmax(axis=1) == labels) + onward * last).mean())


@given(
    table=st.lists(st.builds(candidate, st.floats(0.5, 1), st.floats(1, 50), st.floats(1, 90)), min_size=1, max_size=8),
    target=st.floats(0.5, 1),
    slo_ms=st.floats(1, 90),
)
def test_none_that_meets_all_is_faster(table: list[Candidate], target: float, slo_ms: float) -> None:
    enough = [one for one in table if one.accuracy - MARGIN * one.accuracy_error >= target]
    meets = [one for one in enough if one.p99_latency_s * 1000 <= slo_ms]
    if meets:
        chosen = choose(table, accuracy_target=target, slo_ms=slo_ms)
        assert chosen in meets
        assert chosen.mean_latency_s == min(one.mean_latency_s for one in meets)
    else:
        with pytest.raises(NoCandidateError):
            choose(table, accuracy_target=target, slo_ms=slo_ms)
