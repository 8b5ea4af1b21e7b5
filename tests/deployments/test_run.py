"""What `pliant serve` hears of Serve, which gives states as plain words."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ServeStatus,
)
from support.waiting import HANGS_AFTER_S

from pliant.deployments import run


def test_a_status_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    deployments = {
        "gateway": DeploymentStatusOverview(DeploymentStatus.HEALTHY, trigger, {"RUNNING": 2}, ""),
        "texts": DeploymentStatusOverview(DeploymentStatus.UNHEALTHY, trigger, {"STARTING": 1, "RUNNING": 1}, "why"),
    }
    application = ApplicationStatusOverview(ApplicationStatus.DEPLOY_FAILED, "it failed", 0.0, deployments)
    monkeypatch.setattr(serve, "status", lambda: ServeStatus(applications={"pliant": application}))
    told = json.loads(json.dumps(run._status()))
    assert told == {
        "problems": ["it failed"],
        "deployments": {
            "gateway": {"status": "HEALTHY", "message": "", "replicas": {"RUNNING": 2}},
            "texts": {"status": "UNHEALTHY", "message": "why", "replicas": {"STARTING": 1, "RUNNING": 1}},
        },
    }


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set by an interrupt of this process."""
    found = threading.Event()
    monkeypatch.setattr(run, "_drain", lambda *_: found.set())
    before = signal.signal(signal.SIGINT, run._drain)
    yield found
    signal.signal(signal.SIGINT, before)


def test_a_reader_that_has_gone_is_an_interrupt(interrupted: threading.Event) -> None:
    read, write = os.pipe()
    telling = threading.Thread(target=run._tell, args=(write,))
    telling.start()
    assert not interrupted.wait(0.1)
    os.close(read)
    telling.join(HANGS_AFTER_S)
    assert interrupted.wait(HANGS_AFTER_S)


def test_nor_does_one_that_goes_while_a_status_is_told_stay_unnoticed(
    interrupted: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()

    def status() -> dict[str, Any]:
        os.close(read)
        return {"problems": [], "deployments": {}}

    monkeypatch.setattr(run, "_EVERY_S", 0.01)
    monkeypatch.setattr(run, "_status", status)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    telling = threading.Thread(target=run._tell, args=(write,))
    telling.start()
    telling.join(HANGS_AFTER_S)
    assert interrupted.wait(HANGS_AFTER_S)


def test_a_drain_that_goes_on_is_not_interrupted(interrupted: threading.Event) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    read, write = os.pipe()
    os.close(read)
    run._tell(write)
    assert not interrupted.is_set()
