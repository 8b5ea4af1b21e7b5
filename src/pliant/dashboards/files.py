"""All that Grafana and Prometheus are given, as files of one folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pliant.dashboards import rules
from pliant.dashboards.boards import BOARDS

RAY_S_LIST = "/tmp/ray/prom_metrics_service_discovery.json"
"""Of its nodes' pages; Ray writes it on the head node."""

_PROMETHEUS: dict[str, Any] = {
    "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},
    "rule_files": ["rules.yml"],
    "scrape_configs": [
        {"job_name": "ray", "file_sd_configs": [{"files": [RAY_S_LIST]}]},
        {"job_name": "pliant", "static_configs": [{"targets": ["localhost:8000"]}]},
    ],
}
_DATASOURCE = {
    "apiVersion": 1,
    "datasources": [
        {
            "name": "prometheus",
            "uid": "prometheus",
            "type": "prometheus",
            "url": "http://localhost:9090",
            "isDefault": True,
            "jsonData": {"timeInterval": _PROMETHEUS["global"]["scrape_interval"]},
        }
    ],
}
_PROVIDER = {
    "apiVersion": 1,
    "providers": [
        {
            "name": "pliant",
            "folder": "pliant",
            "type": "file",
            "allowUiUpdates": True,
            "options": {"path": "/etc/grafana/dashboards/pliant"},
        }
    ],
}


def boards() -> Iterator[tuple[str, str]]:
    """Name and content of each dashboard's file."""
    for board in BOARDS:
        yield f"pliant-{board.name}.json", json.dumps(board.as_json(), indent=1) + "\n"


def files() -> dict[str, str]:
    """Contents by path within the folder."""
    return {
        **{f"grafana/{name}": content for name, content in boards()},
        "grafana/provisioning/datasources/prometheus.yml": _yaml(_DATASOURCE),
        "grafana/provisioning/dashboards/pliant.yml": _yaml(_PROVIDER),
        "prometheus/prometheus.yml": _yaml(_PROMETHEUS),
        "prometheus/rules.yml": _yaml(rules.as_yaml()),
    }


def write(folder: Path) -> None:
    """Write `files` below `folder`, over what is there."""
    for name, content in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=120)
