"""What the console shows of vision transformers: how many tokens images get, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pliant.deployments.serving.history import Past, of_tenants, tenants
from pliant.deployments.serving.panels import Chart, Panel, Readings, Table

_FATES = ("in_time", "late", "evicted", "shed", "failed")
_COLUMNS = ("replica", "gamma", "computed by", "waiting", "p50 ms", "p98 ms", "utility", "images")


def readings(report: Mapping[str, Any]) -> Readings:
    """Of one replica's report."""
    by_gamma = {
        f"gamma {gamma}": (f"gammas/{gamma}", counts["images"]) for gamma, counts in report.get("gammas", {}).items()
    }
    by_fate = {fate: (f"fates/{fate.replace('_', ' ')}", report.get(fate, 0)) for fate in _FATES}
    return Readings(
        {"waiting": float(report.get("waiting", 0)), **tenants(report)},
        {**by_gamma, **by_fate, "utility": ("utility", report.get("utility", 0.0))},
    )


def panels(view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
    """Of one service."""
    yield Chart("Images per second, by gamma", past.lines("gammas/"), stacked=True)
    yield Chart("Images per second, by fate", past.lines("fates/"), stacked=True)
    yield Chart("Utility per second", {"utility": past.line("utility")})
    yield Chart("Images that wait", {"images": past.line("waiting")})
    yield from of_tenants(past, "Computing that waits", "s")
    rows = [
        (
            name,
            str(report.get("gamma", "")),
            str(report.get("backend", "")),
            report.get("waiting", 0),
            report.get("p50_ms", 0.0),
            report.get("p98_ms", 0.0),
            report.get("utility", 0.0),
            report.get("served", 0),
        )
        for name, report in sorted(view["replicas"].items())
    ]
    yield Table("Replicas", _COLUMNS, rows)
