"""What replicas have room for: what runtimes took when they were loaded, of those that were."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.doubles import Bed, Sleepers, report

from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.memory import residency

LENGTHS = (8, 16, 32)


def said(room_mb: float, memory_mb: dict[int, float]) -> Any:
    return {**report(32), "room_mb": room_mb, "memory_mb": memory_mb}


async def test_what_all_share_is_not_counted_for_the_first() -> None:
    sleepers = Sleepers((8, 16), service_s=0)
    sleepers.memory = Bed(sleepers, 100)
    engine = Engine(sleepers)
    await engine.hold(16)
    found = await engine.hold(16, (8, 16))
    assert found["memory_mb"] == {16: 16.0, 8: 8.0}
    assert found["room_mb"] == 100
    assert [sleeper.max_length for sleeper in sleepers.loaded] == [16, 16, 8]


async def test_where_there_is_one_nothing_is_measured() -> None:
    sleepers = Sleepers((8, 16), service_s=0)
    found = await Engine(sleepers).hold(16)
    assert found["memory_mb"] == {}
    assert found["room_mb"] is None
    assert len(sleepers.loaded) == 1


def test_one_that_nobody_loaded_may_need_as_much_as_any() -> None:
    found = residency("s", LENGTHS, [said(100, {8: 10, 16: 30}), said(80, {8: 12}), said(90, {8: 90})])
    assert found.memory_mb == {8: 12, 16: 30, 32: 30}
    assert found.budget_mb == 80


def test_any_one_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pliant"):
        found = residency("s", LENGTHS, [said(20, {32: 50})])
    assert found.budget_mb == 50
    assert "s: one runtime takes 50 MB, more than the memory_mb for all, 20" in caplog.text


def test_without_measurements_there_is_room_for_one() -> None:
    found = residency("s", LENGTHS, [said(100, {}), said(100, {})])
    assert set(found.memory_mb.values()) == {found.budget_mb}


def test_replicas_that_say_nothing_are_of_an_older_version() -> None:
    found = residency("s", LENGTHS, [report(32)])
    assert set(found.memory_mb.values()) == {found.budget_mb}
