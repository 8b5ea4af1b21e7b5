"""Value curves of each kind, as the live planner has them, made once for rates and spreads that are near each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from pliant.policies.cluster.attainment import Floats
from pliant.policies.encoder import value_curve as encoder
from pliant.policies.llm import value_curve as llm
from pliant.policies.vision import value_curve as vision

Curve = Callable[[float, float], Floats]
"""By rate and spread: requests per second in time, or their utility, with 0 to so many replicas."""

_GRID = 1.04
"""Rates are rounded to a factor."""
_SPREADS = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.8])


def texts(service_s: float, slo_s: float, most: int) -> Curve:
    """Of texts that take `service_s` each."""
    return _rounded(lambda rate, spread: encoder.value_curve({512: service_s}, {512: rate}, slo_s, most, spread))


def answers(speeds: llm.Speeds, lengths: llm.Lengths, objectives: llm.Objectives, most: int) -> Curve:
    """Of a language model."""
    return _rounded(
        lambda rate, spread: llm.value_curve(speeds, lengths, objectives, rate, most, spread) / lengths.answer
    )


def images(row_s: Floats, gains: Floats, most: int, slo_s: float) -> Curve:
    """Of images that take `row_s` and earn `gains`, 1 at best, by gamma."""
    return _rounded(lambda rate, spread: vision.value_curve(row_s, {0: (rate, gains)}, most, spread, slo_s))


def elastic(row_s: Floats, gains: Floats) -> tuple[Floats, Floats]:
    """Replicas per image and second, and what an image earns with them."""
    taken, earned = vision.steps(row_s, {0: (1.0, gains)})
    return taken / vision.USED, earned


def _rounded(curve: Curve) -> Curve:
    kept = cache(curve)

    def near(rate: float, spread: float) -> Floats:
        rate = max(rate, 1e-3)
        grid = float(_GRID ** round(np.log(rate) / np.log(_GRID)))
        return kept(grid, float(_SPREADS[np.abs(_SPREADS - spread).argmin()])) * (rate / grid)

    return near
