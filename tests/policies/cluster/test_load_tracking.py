"""How many replicas keep a share of each busy: no flapping, and enough at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.load_tracking import LoadTracking

PERIOD_S = 10.0


def followed(tracking: LoadTracking, busy: list[float], least: int = 1, most: int = 20) -> list[int]:
    """The counts where so many replicas are kept busy in each period; each has one replica's time at most."""
    count, found = least, []
    for step, each in enumerate(busy):
        count = tracking.desired(step * PERIOD_S, min(1.0, each / count), count, least, most)
        found.append(count)
    return found


@given(st.floats(0, 12), st.integers(1, 3), st.integers(4, 20))
def test_a_steady_load_ends_where_the_target_is_met(busy: float, least: int, most: int) -> None:
    counts = followed(LoadTracking(0.5), [busy] * 200, least, most)
    needed = min(max(math.ceil(busy / 0.55 - 1e-9), least), most)
    assert len(set(counts[-20:])) == 1
    assert needed <= counts[-1] <= max(needed, math.ceil(busy / 0.45)), "as near as the tolerance says"


@given(st.integers(2, 29), st.floats(1, 4))
def test_a_square_wave_within_the_quiet_time_is_held_at_its_top(half: int, low: float) -> None:
    counts = followed(LoadTracking(0.5, down_s=300), ([low] * half + [low + 3] * half) * 10)
    assert len(set(counts[4 * half :])) == 1


def test_noise_moves_nothing_and_a_ramp_goes_one_way() -> None:
    rng = np.random.default_rng(0)
    noisy = followed(LoadTracking(0.6), [3 * each for each in rng.normal(1, 0.03, 500).tolist()])
    assert len(set(noisy[40:])) == 1
    ramp = followed(LoadTracking(0.6), [0.02 * step for step in range(400)])
    assert ramp == sorted(ramp)


def test_a_surge_is_answered_at_once_and_an_end_after_the_quiet_time() -> None:
    counts = followed(LoadTracking(0.6, down_s=100), [0.5] * 3 + [4.0] * 9 + [0.5] * 12)
    assert counts[:3] == [1] * 3
    assert counts[3:6] == [2, 4, 7]
    assert counts[11] == 7
    assert counts[12:21] == [7] * 9
    assert counts[22:] == [1, 1]


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"target": 1.1}, {"down_s": -1.0}])
def test_arguments_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="target must be from 0 to 1"):
        LoadTracking(**wrong)
