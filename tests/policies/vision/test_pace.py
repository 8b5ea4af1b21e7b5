"""What batches are foreseen to take: as the profile says, by what they took of late."""

from __future__ import annotations

import pytest

from pliant.policies.vision.pace import Pace
from pliant.policies.vision.token_profile import TokenProfile


def test_nine_of_ten_batches_of_late_took_no_more() -> None:
    profile = TokenProfile([0], lambda gamma, rows: 0.1 * rows, lambda task, gamma: 1.0, most_rows=2)
    pace = Pace(profile, 0.0)
    assert pace.foreseen_s(0, 2) == pytest.approx(0.2)
    for number in range(1, 101):
        pace.computed(0, 1, 0.1 * (1 + number / 100), float(number))
    recent = [1 + number / 100 for number in range(69, 101)]
    assert sum(took > pace.slowdown for took in recent) == 3
    assert pace.foreseen_s(0, 2) == pytest.approx(0.2 * pace.slowdown)
    assert pace.soonest_s == pytest.approx(0.1), "an image may be as fast as the profile says"
    pace.recover()
    assert pace.foreseen_s(0, 2) == pytest.approx(0.2)
