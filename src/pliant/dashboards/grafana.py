"""Grafana's dashboards, as far as ours need it: rows of panels, each with expressions of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["short", "reqps", "percentunit", "s", "ms", "bytes", "none"]
"""Grafana's names."""

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_HEIGHT = 8
_SCHEMA = 39
"""Grafana 11's; newer ones read it, too."""


@dataclass(frozen=True)
class Query:
    """An expression, and how its series are named: `{{service}}` is the value of a label."""

    expression: str
    legend: str = "{{service}}"


@dataclass(frozen=True)
class Panel:
    """What it shows; `help` says what to do about it, to a reader who has never seen it."""

    title: str
    queries: tuple[Query, ...]
    help: str
    unit: Unit = "short"
    sort: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    """Of 24 columns."""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """`name` is its file's and, with "pliant-" before it, its address."""

    name: str
    title: str
    services: str
    """A metric whose label `service` has the values to choose from."""
    rows: tuple[Row, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        """Of all rows."""
        for row in self.rows:
            yield from row.panels

    def as_json(self) -> dict[str, Any]:
        """What Grafana imports."""
        return {
            "uid": f"pliant-{self.name}",
            "title": self.title,
            "tags": ["pliant"],
            "schemaVersion": _SCHEMA,
            "version": 1,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "links": [{"type": "dashboards", "tags": ["pliant"], "title": "pliant", "asDropdown": True}],
            "templating": {"list": [_source(), _service(self.services)]},
            "panels": list(self._placed()),
        }

    def _placed(self) -> Iterator[dict[str, Any]]:
        y, number = 0, 0
        for row in self.rows:
            number += 1
            head = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
            yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": head}
            y, x = y + 1, 0
            for panel in row.panels:
                if x + panel.width > _COLUMNS:
                    x, y = 0, y + _HEIGHT
                number += 1
                yield _panel(panel, number, {"h": _HEIGHT, "w": panel.width, "x": x, "y": y})
                x += panel.width
            y += _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.sort == "timeseries":
        defaults |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never", "spanNulls": True}}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        }
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return {
        "id": number,
        "type": panel.sort,
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _service(metric: str) -> dict[str, Any]:
    return {
        "name": "service",
        "type": "query",
        "label": "Service",
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({metric}, service)", "refId": "service"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
