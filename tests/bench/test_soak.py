"""What the soak says of memory that grows, of memory that does not, and of memory that only warms up."""

from __future__ import annotations

import random

import pytest

from pliant.bench.soak.watch import Sample, growth, warmed_up


def samples(memory: list[float]) -> list[Sample]:
    return [Sample(5.0 * index, {"gateway": each}, {}, {}, {}) for index, each in enumerate(memory)]


def noise(seed: int, count: int = 400) -> list[float]:
    """That goes up and down for a while, as memory does."""
    rng, value, found = random.Random(seed), 0.0, []
    for _ in range(count):
        value = 0.8 * value + rng.gauss(0, 1)
        found.append(value)
    return found


@pytest.mark.parametrize("per_s", [0.0, 0.5, -0.25])
def test_growth_is_extrapolated_to_an_hour(per_s: float) -> None:
    jitter = (1.0, -1.0, -1.0, 1.0)
    seen = samples([100 + 5.0 * index * per_s + jitter[index % 4] for index in range(400)])
    memory = [sample.private_mb for sample in seen]
    found = growth(seen, memory, "gateway")
    assert found.an_hour == pytest.approx(3600 * per_s, abs=0.5)
    assert growth(seen, memory, "nobody") == (0, 0, 0)
    with pytest.raises(ValueError, match="needs 10 samples, got 9"):
        growth(seen[:9], memory[:9], "gateway")


@pytest.mark.parametrize("per_hour", [0.0, 30.0])
def test_growth_lies_between_its_bounds(per_hour: float) -> None:
    within = 0
    for seed in range(200):
        seen = samples([100 + per_hour * 5 * index / 3600 + each for index, each in enumerate(noise(seed))])
        found = growth(seen, [sample.private_mb for sample in seen], "gateway")
        within += found.least <= per_hour <= found.most
    assert within >= 0.93 * 200


def test_a_warm_up_is_left_out_and_growth_is_not() -> None:
    warming = [100 - 50 * max(0.0, 1 - index / 100) + each for index, each in enumerate(noise(1))]
    assert 80 <= warmed_up(warming) <= 130
    assert warmed_up([1.0] * 100) == 0
    assert warmed_up([float(index) for index in range(100)]) == 50
