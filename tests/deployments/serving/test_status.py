"""What the gateway's page for Prometheus says of services of all kinds."""

from __future__ import annotations

from typing import Any

from pliant.deployments.serving.status import exposition


def test_services_of_all_kinds() -> None:
    chat: dict[str, Any] = {
        "kind": "toy",
        "ready": True,
        "replicas": {"a": {"ejected": True}, "b": {}},
        "problem": None,
    }
    away = {"kind": "toy", "ready": False, "replicas": {}, "problems": ["one", "two"], "problem": "three"}
    page = exposition({"planner_reached": False, "services": {"chat": chat, "away": away}}, {}).decode().splitlines()
    for line in (
        "pliant_planner_reached 0.0",
        'pliant_service_ready{kind="toy",service="chat"} 1.0',
        'pliant_service_ready{kind="toy",service="away"} 0.0',
        'pliant_service_replicas{kind="toy",service="chat"} 2.0',
        'pliant_service_replicas_ejected{kind="toy",service="chat"} 1.0',
        'pliant_service_problems{kind="toy",service="chat"} 0.0',
        'pliant_service_problems{kind="toy",service="away"} 3.0',
    ):
        assert line in page
