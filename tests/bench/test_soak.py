"""What the soak says of memory that grows, and of memory that does not."""

from __future__ import annotations

import pytest

from pliant.bench.soak.watch import Sample, growth


@pytest.mark.parametrize("per_s", [0.0, 0.5, -0.25])
def test_growth_is_extrapolated_to_an_hour(per_s: float) -> None:
    jitter = (1.0, -1.0, -1.0, 1.0)
    samples = [
        Sample(5.0 * index, {"gateway": 100 + 5.0 * index * per_s + jitter[index % 4]}, {}, {}, {})
        for index in range(400)
    ]
    memory = [sample.pss_mb for sample in samples]
    assert growth(samples, memory, "gateway") == pytest.approx(3600 * per_s, abs=0.5)
    assert growth(samples, memory, "nobody") == 0
