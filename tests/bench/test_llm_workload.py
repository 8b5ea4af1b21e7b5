"""What the language-model benchmark promises of its workloads: arrivals, lengths, and the same from the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.bench.llm.workload import (
    PAPER_INTERVAL_MS,
    PAPER_SOLO_MS,
    at_once,
    every,
    poisson,
    prompts,
    scaled,
    uniform_lengths,
)


def test_lengths_fill_their_range_and_a_wider_range_stretches_them() -> None:
    narrow, wide = (uniform_lengths(2000, 128, upper, seed=1) for upper in (256, 512))
    assert (min(wide), max(wide)) == (128, 512)
    assert np.mean(wide) == pytest.approx(320, rel=0.03)
    stretched = 128 + (np.array(narrow) - 128) * (385 / 129)
    assert np.abs(np.array(wide) - stretched).max() < 4, "who is longer stays longer"
    assert uniform_lengths(5, 128, 128, seed=3) == [128] * 5


def test_constant_arrivals_are_one_interval_apart() -> None:
    workload = every(0.25, at_once(prompts(4, 8, 100, seed=0), [1, 2, 3, 4]))
    assert [request.at_s for request in workload] == [0, 0.25, 0.5, 0.75]
    assert [request.tokens for request in workload] == [1, 2, 3, 4]


def test_poisson_arrivals_start_at_once_and_keep_their_pattern_at_another_pace() -> None:
    workload = at_once(prompts(4000, 1, 100, seed=0), [1] * 4000)
    slow, fast = ([request.at_s for request in poisson(mean_s, workload, seed=2)] for mean_s in (1.0, 0.1))
    gaps = np.diff(slow)
    assert slow[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1, rel=0.06)
    assert gaps.std() == pytest.approx(1, rel=0.06)
    assert np.allclose(np.array(slow) / 10, fast)


def test_prompts_differ_and_lie_in_the_vocabulary() -> None:
    made = prompts(32, 16, 50, seed=0)
    assert len({tuple(prompt.tolist()) for prompt in made}) == 32
    assert {len(prompt) for prompt in made} == {16}
    assert min(prompt.min() for prompt in made) >= 0
    assert max(prompt.max() for prompt in made) < 50


def test_times_of_the_paper_scale_with_what_one_request_takes() -> None:
    assert scaled(PAPER_SOLO_MS, 0.2) == pytest.approx(0.2)
    assert scaled(PAPER_INTERVAL_MS, 5.8) == pytest.approx(0.5)
