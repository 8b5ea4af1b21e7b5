"""Gammas that no task needs are kept from plans, and come back with a task that does."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from pliant.deployments.vision.tasks import Tasks, key
from pliant.deployments.vision.useful_gammas import UsefulGammas
from pliant.formats.vision_task import TaskRef

GAMMAS = (-4, 0, 2, 8)
SECONDS = {-4: 0.5, 0: 1.0, 2: 1.2, 8: 2.0}
FLAT = TaskRef("flat", "/flat", "1", 2, (2, 8))
STEEP = TaskRef("steep", "/steep", "1", 2, (8,))
ACCURACIES: dict[TaskRef, Mapping[int, float]] = {
    FLAT: {-4: 0.6, 0: 0.9, 2: 0.9, 8: 0.85},
    STEEP: {-4: 0.6, 0: 0.7, 8: 0.8},
}


class Loader:
    async def load(self, task: TaskRef) -> Mapping[int, float]:
        return ACCURACIES[task]

    async def unload(self, task: TaskRef) -> None: ...


async def test_what_another_gamma_does_as_well_is_not_planned_with(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pliant")
    tasks = Tasks(Loader())
    useful = UsefulGammas("digits", GAMMAS, lambda gamma, rows: SECONDS[gamma] * rows, tasks, 4)
    assert useful.dropped() == {}
    await tasks.acquire(FLAT)
    assert [useful.accuracy(key(FLAT), gamma) for gamma in GAMMAS] == [0.6, 0.9, None, None]
    assert useful.dropped() == {2: 0, 8: 0}
    told = "digits: gamma 8 is not used: gamma 0 is at least as fast, and as accurate for every task"
    assert [record.getMessage() for record in caplog.records].count(told) == 1
    await tasks.acquire(STEEP)
    assert [useful.accuracy(key(FLAT), gamma) for gamma in GAMMAS] == [0.6, 0.9, None, 0.85]
    assert useful.accuracy(key(STEEP), 8) == 0.8
    assert caplog.records[-1].getMessage() == "digits: gamma 8 is used again, with the tasks that there are now"
    tasks.release(STEEP)
    await tasks.forget(STEEP)
    assert useful.dropped() == {2: 0, 8: 0}
