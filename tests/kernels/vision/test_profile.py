"""Latency tables: interpolated as they say, and measured on a small model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.vision_folders import vision_folder

from pliant.kernels.vision import executor as vit_executor
from pliant.kernels.vision import profile as vit_profile
from pliant.kernels.vision.profile import LatencyTable, measure

TABLE = LatencyTable((-3, 0), (1, 4, 8), ((1.0, 2.5, 4.5), (2.0, 5.0, 9.0)), ((1, 4, 8), (2, 8, 16)))


@pytest.mark.parametrize(
    ("gamma", "rows", "seconds"), [(0, 1, 2.0), (0, 4, 5.0), (0, 2, 3.0), (-3, 6, 3.5), (0, 8, 9.0), (0, 10, 11.0)]
)
def test_is_linear_between_and_beyond_what_was_measured(gamma, rows, seconds) -> None:
    assert TABLE.latency(gamma, rows) == pytest.approx(seconds)


def test_one_measured_batch_gives_a_time_for_each_row() -> None:
    assert LatencyTable((0,), (4,), ((2.0,),), ((1,),)).latency(0, 6) == pytest.approx(3.0)


def test_knows_measured_gammas_alone() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        TABLE.latency(2, 1)


def test_survives_json() -> None:
    assert LatencyTable(**json.loads(json.dumps(dataclasses.asdict(TABLE)))) == TABLE


def test_measures_every_batch(tmp_path: Path) -> None:
    vision_folder(tmp_path)
    executor = vit_executor.load(tmp_path, most_rows=4)
    steps: list[float] = []
    table = measure(executor, [2, -3, 0], [4, 1], lambda _text, done: steps.append(done), budget_s=0.1)
    assert (table.gammas, table.batches) == ((-3, 0, 2), (1, 4))
    assert all(0 < one <= four for one, four in table.seconds)
    assert table.memory_bytes[0][1] == executor.memory_bytes(-3, 4)
    assert steps == sorted(steps)
    with pytest.raises(KeyError):
        executor.remove_task(vit_profile._PROBE)


def test_stops_at_batches_that_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit_profile, "_LONGEST_S", 0.0)
    vision_folder(tmp_path)
    table = measure(vit_executor.load(tmp_path, most_rows=4), [0], [1, 2, 4], budget_s=0.01)
    assert table.batches == (1,)
    assert table.latency(0, 4) == pytest.approx(4 * table.seconds[0][0])
