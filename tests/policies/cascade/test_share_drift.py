"""The watch on a share: silent while nothing changes, soon and right when something does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.cascade.share_drift import ShareDrift


def texts_until_drift(watch: ShareDrift, share: float, seed: int, most: int, batch: int = 1) -> int:
    """How many texts of a true `share` it takes; `most` when it does not."""
    random = np.random.default_rng(seed)
    for texts in range(batch, most + 1, batch):
        watch.observe(batch, int(random.binomial(batch, share)))
        if watch.drift():
            return texts
    return most


@pytest.mark.parametrize(("before", "after"), [(0.3, 0.5), (0.3, 0.1), (0.9, 0.7), (0.02, 0.2)])
@pytest.mark.parametrize("batch", [1, 25])
def test_a_moved_share_is_found_soon_and_told_in_numbers(before: float, after: float, batch: int) -> None:
    for seed in range(10):
        watch = ShareDrift(before, 2000)
        texts_until_drift(watch, before, seed, 1000)
        assert watch.drift() is None
        assert texts_until_drift(watch, after, 100 + seed, 2000, batch) < 500
        drift = watch.drift()
        assert drift is not None
        assert drift.profiled == before
        assert (drift.recent > before) == (after > before)
        assert drift.recent == pytest.approx(after, abs=0.25)


def test_false_alarms_are_as_rare_as_asked() -> None:
    waits = [texts_until_drift(ShareDrift(0.4, 10_000, false_alarm_texts=200), 0.4, seed, 4000) for seed in range(60)]
    assert np.mean(waits) > 100, "two watches of at least 200 texts each, on average"
    assert all(texts_until_drift(ShareDrift(0.4, 10_000), 0.4, seed, 100_000, batch=50) == 100_000 for seed in range(3))


@pytest.mark.parametrize("share", [0.0, 1.0, 0.97, 0.5])
def test_a_share_as_profiled_is_no_drift_however_few_texts_the_profile_had(share: float) -> None:
    for seed in range(5):
        profiled = float(np.random.default_rng(seed).binomial(60, share)) / 60
        assert texts_until_drift(ShareDrift(profiled, 60), share, seed, 20_000, batch=20) == 20_000


def test_a_fall_counts_only_where_it_matters() -> None:
    for may_fall in (True, False):
        watch = ShareDrift(0.3, 2000, may_fall=may_fall)
        assert (texts_until_drift(watch, 0.05, 0, 2000) < 2000) == may_fall
        assert texts_until_drift(ShareDrift(0.3, 2000, may_fall=may_fall), 0.5, 0, 2000) < 500


def test_a_drift_that_ends_is_over() -> None:
    watch = ShareDrift(0.3, 2000)
    watch.observe(5000, 3000)
    assert watch.drift() is not None
    assert texts_until_drift(watch, 0.3, 0, 10) == 1, "not at once"
    for _ in range(400):
        watch.observe(10, 3)
    assert watch.drift() is None


@settings(max_examples=40)
@given(fates=st.lists(st.booleans(), max_size=300), share=st.floats(0.15, 0.85))
def test_it_is_pages_test(fates: list[bool], share: float) -> None:
    """The most evidence over all spans that end now, written out, with an alarm in easy reach."""
    watch = ShareDrift(share, 10**15, shift=0.1, false_alarm_texts=20)
    before, best = share, 0.0
    for fate in fates:
        watch.observe(1, int(fate))
    for after in (before - 0.1, before + 0.1):
        gains = [math.log(after / before) if fate else math.log((1 - after) / (1 - before)) for fate in fates]
        score = 0.0
        for gain in gains:
            score = min(max(0.0, score + gain), 2 * math.log(20))
        best = max(best, score)
    assert (watch.drift() is not None) == (best >= math.log(20))


@pytest.mark.parametrize(("share", "profiled"), [(0.1, 1000), (0.05, 1000), (0.02, 2000), (0.12, 500)])
def test_a_small_share_that_falls_to_none_is_noticed_and_a_great_one_that_rises_to_all(
    share: float, profiled: int
) -> None:
    assert texts_until_drift(ShareDrift(share, profiled), 0.0, 0, 3000) < 2000
    assert texts_until_drift(ShareDrift(1 - share, profiled), 1.0, 0, 3000) < 2000
    for same in (share, 1 - share):
        assert texts_until_drift(ShareDrift(same, profiled), same, 0, 100_000, batch=50) == 100_000


def test_false_alarms_of_small_shares_are_as_rare_as_asked() -> None:
    def wait(share: float, seed: int) -> int:
        return texts_until_drift(ShareDrift(share, 10_000, false_alarm_texts=200), share, seed, 4000)

    for share in (0.05, 0.95):
        assert np.mean([wait(share, seed) for seed in range(60)]) > 100, "two watches of at least 200 texts each"


def test_what_makes_no_sense_is_refused() -> None:
    watch = ShareDrift(0.5, 100)
    with pytest.raises(ValueError, match="of 3 texts 4"):
        watch.observe(3, 4)
    watch.observe(0, 0)
    assert watch.drift() is None
    with pytest.raises(ValueError, match="share from 0 to 1"):
        ShareDrift(1.5, 100)
