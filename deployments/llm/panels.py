"""What the console shows of language models: tokens, who waits, and what memory holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pliant.deployments.serving.history import Past
from pliant.deployments.serving.panels import Bars, Chart, Panel, Readings, Table

_COLUMNS = ("replica", "live", "waiting", "tokens/s", "step ms", "adapters in memory", "hits", "loads", "answers")


def readings(report: Mapping[str, Any]) -> Readings:
    """Of one replica's report."""
    adapters, memory = report.get("adapters", {}), report.get("memory", {})
    levels = {f"answers/{name}": float(report.get(name, 0)) for name in ("live", "waiting")}
    counters = {
        "served": ("answered", report.get("served", 0)),
        "hits": ("adapters/in memory", adapters.get("hits", 0)),
        "misses": ("adapters/loaded first", adapters.get("misses", 0)),
        "hit": ("prefixes/there already", memory.get("hit", 0)),
        "missed": ("prefixes/computed", memory.get("missed", 0)),
    }
    return Readings(levels, counters)


def panels(view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
    """Of one service."""
    yield Chart("Answers under way", past.lines("answers/"), stacked=True)
    yield Chart("Answers completed per second", {"answers": past.line("answered")})
    yield Chart("Tokens of prompts per second", past.lines("prefixes/"), stacked=True)
    yield _memory(view["replicas"].values())
    if view.get("adapters"):
        yield Chart("Requests per second whose adapter was", past.lines("adapters/"), stacked=True)
        held = Counter(
            name for report in view["replicas"].values() for name in report.get("adapters", {}).get("resident", ())
        )
        yield Bars("Adapters in memory, by replicas that hold them", dict(held.most_common(12)))
    rows = []
    for name, report in sorted(view["replicas"].items()):
        adapters = report.get("adapters", {})
        rows.append(
            (
                name,
                f"{report.get('live', 0)} of {report.get('slots', 0)}",
                report.get("waiting", 0),
                report.get("tokens_per_s", 0.0),
                report.get("step_ms", 0.0),
                len(adapters.get("resident", ())),
                adapters.get("hits", 0),
                adapters.get("loads", 0),
                report.get("served", 0),
            )
        )
    yield Table("Replicas", _COLUMNS, rows)


def _memory(reports: Iterable[Mapping[str, Any]]) -> Bars:
    """What pages and adapters of all replicas take."""
    held, most = Counter[str](), 0
    for report in reports:
        memory, adapters = report.get("memory", {}), report.get("adapters", {})
        page_bytes = memory.get("page_bytes", 0)
        held["requests"] += memory.get("live", 0) * page_bytes
        held["prefixes kept"] += memory.get("idle", 0) * page_bytes
        held["adapters"] += adapters.get("bytes", 0)
        most += memory.get("pages", 0) * page_bytes
    return Bars("Memory, by what holds it", dict(held), unit="bytes", most=most or None)
