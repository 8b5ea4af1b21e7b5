"""What cascades ask of their levels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.level_demand import level_demand


def candidate(
    levels: tuple[str, ...], shares: tuple[float, ...], accuracy: float, gated_share: float = 0.0
) -> Candidate:
    nothing = (0.0,) * len(levels)
    gate = 64 if gated_share else None
    facts = 1.0, accuracy, 0.01, 0.0, 0.0, 0.01, 0.01, 0.02
    return Candidate(levels, nothing[1:], nothing, nothing, (), *facts, shares, 0.0, gate, gated_share)


def test_later_levels_earn_what_they_add() -> None:
    demand = level_demand(candidate(("small", "large"), (0.8, 0.2), 0.92), 100.0, {"small": 0.84, "large": 0.93})
    assert demand["small"] == pytest.approx((100.0, 0.84))
    assert demand["large"] == pytest.approx((20.0, 0.08 / 0.2))


def test_texts_past_the_gate_ask_the_last_level_alone() -> None:
    chosen = candidate(("small", "large"), (0.6, 0.4), 0.92, gated_share=0.25)
    demand = level_demand(chosen, 100.0, {"small": 0.84, "large": 0.93})
    assert demand["small"] == pytest.approx((75.0, 0.84))
    assert demand["large"] == pytest.approx((40.0, (25 * 0.92 + 75 * 0.08) / 40))


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=3),
    st.floats(0.5, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.1, 1000),
    st.floats(0.0, 1.0),
)
def test_all_in_time_earn_the_accuracy(
    parts: list[float], accuracy: float, first: float, rate: float, gated: float
) -> None:
    names = ("a", "b", "c")[: len(parts)]
    shares = tuple(part / sum(parts) for part in parts)
    first = accuracy if len(parts) == 1 else first * accuracy
    chosen = candidate(names, shares, accuracy, gated / 2 * shares[-1] if len(parts) > 1 else 0.0)
    demand = level_demand(chosen, rate, dict.fromkeys(names, first))
    assert sum(each.rate * each.worth for each in demand.values()) == pytest.approx(rate * accuracy)
    assert all(each.worth >= 0 and each.rate <= rate * (1 + 1e-9) for each in demand.values())
