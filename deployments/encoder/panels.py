"""What the console shows of text classifiers: texts by length, and what each replica holds and does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pliant.deployments.serving.history import Past, of_tenants, tenants
from pliant.deployments.serving.panels import Bars, Chart, Panel, Readings, Table

_COLUMNS = ("replica", "home", "lengths", "computed by", "waiting", "p50 ms", "p98 ms", "texts")


def readings(report: Mapping[str, Any]) -> Readings:
    """Of one replica's report."""
    length = str(_home(report))
    return Readings(
        {f"homes/{length}": 1.0, "waiting": float(report.get("waiting", 0)), **tenants(report)},
        {
            "served": (f"texts/{length}", report.get("served", 0)),
            "tokens": ("tokens/texts", report.get("tokens", 0)),
            "padding": ("tokens/padding", report.get("computed_tokens", 0) - report.get("tokens", 0)),
        },
    )


def panels(view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
    """Of one service."""
    yield Chart("Texts per second, by home length", past.lines("texts/"), stacked=True)
    yield Chart("Replicas, by home length", past.lines("homes/"), stacked=True)
    yield Chart("Texts that wait or run", {"texts": past.line("waiting")})
    yield Chart("Tokens per second", past.lines("tokens/"), stacked=True)
    yield from of_tenants(past, "Computing that waits", "s")
    plan = view["plan"]
    if demand := plan.get("demand_per_s"):
        yield Bars("Planned demand, texts per second", {str(key): demand[key] for key in demand})
    rows = [
        (
            name,
            str(_home(report)),
            ", ".join(map(str, report.get("lengths", ()))),
            str(report.get("backend", "")),
            report.get("waiting", 0),
            report.get("p50_ms", 0.0),
            report.get("p98_ms", 0.0),
            report.get("served", 0),
        )
        for name, report in sorted(view["replicas"].items())
    ]
    yield Table("Replicas", _COLUMNS, rows)


def _home(report: Mapping[str, Any]) -> int:
    """The length of the texts that a replica is to have first, in tokens; 0 while it changes."""
    return int(report.get("home", 0) or report.get("max_length", 0))
