"""What `pliant serve` hears of Serve, which gives states as plain words."""

from __future__ import annotations

import json

import pytest
from ray import serve
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ServeStatus,
)

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
