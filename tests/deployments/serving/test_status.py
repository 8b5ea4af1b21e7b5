"""What the gateway's page for Prometheus says of services of all kinds."""

from __future__ import annotations

from typing import Any

from pliant.deployments.serving.status import exposition


def test_services_of_all_kinds() -> None:
    chat: dict[str, Any] = {
        "kind": "toy",
        "ready": True,
        "replica_range": [1, 2],
        "replicas": {"a": {"ejected": True}, "b": {}},
        "problem": None,
    }
    away = chat | {"ready": False, "replicas": {}, "problems": ["one", "two"], "problem": "three"}
    route = chat | {"replica_range": None, "replicas": {}}
    views = {"chat": chat, "away": away, "ask": route}
    page = exposition({"planner_reached": False, "services": views}, {}).decode().splitlines()
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
    assert not any(line.startswith("pliant_service_replicas") and '"ask"' in line for line in page)
