"""The table of a runtime whose speed is known is what was measured of it, of passes that are worth measuring."""

from types import SimpleNamespace
from typing import Any

import pytest

from pliant.kernels.encoder import pass_times


@pytest.mark.parametrize("longest", [8, 100, 512, 4096])
def test_measures_passes_of_every_size(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run_all(texts: Any) -> None:
        nonlocal now
        tokens = sum(len(text.ids) for text in texts)
        assert len(texts) == 1 or tokens <= 1024
        now += 1e-3 + 1e-5 * tokens

    monkeypatch.setattr(pass_times, "time", SimpleNamespace(perf_counter=lambda: now))
    done: list[float] = []
    runtime: Any = SimpleNamespace(run_all=run_all, max_length=longest)
    found = pass_times.measure(runtime, budget_s=1.0, report=done.append)
    assert found.lengths[-1] == longest
    assert found.packed_s([longest]) == pytest.approx(1e-3 + 1e-5 * longest)
    assert found.packed_s([8] * 16) == pytest.approx(1e-3 + 1e-5 * 128)
    assert done == sorted(done)
