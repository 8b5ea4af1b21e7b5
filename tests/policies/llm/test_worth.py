"""What idle things are worth."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pliant.policies.llm.worth import PATIENCE_S, Use, scorer

NOW = 100.0
PREFIX = Use(frequency=1.0, last_used=NOW, cost=0.003, bytes=1, per_s=0.0)
JOINT = scorer("joint", [], NOW)


def test_it_is_the_seconds_that_a_byte_saves() -> None:
    half = JOINT(PREFIX._replace(per_s=1 / PATIENCE_S))
    assert half == pytest.approx(0.003 / PATIENCE_S)
    assert JOINT(PREFIX._replace(cost=0.006, bytes=4)) == pytest.approx(JOINT(PREFIX) / 2)


def test_it_falls_with_age_down_to_what_is_known_of_its_uses() -> None:
    used = [PREFIX._replace(last_used=NOW - age, per_s=0.1) for age in (0, 1, 10, 100, 1e9)]
    assert all(JOINT(later) < JOINT(earlier) for earlier, later in pairwise(used))
    assert JOINT(used[-1]) == pytest.approx(0.1 / 2 * 0.003)


def test_a_large_adapter_that_is_seldom_used_is_worth_less_than_the_pages_in_its_place() -> None:
    seldom = Use(2, NOW - 60, cost=0.04, bytes=32, per_s=2 / 300)
    often = seldom._replace(frequency=90, per_s=0.3, last_used=NOW - 3)
    assert JOINT(seldom) < JOINT(PREFIX._replace(last_used=NOW - 30)) < JOINT(often)
