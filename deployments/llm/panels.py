"""What the console shows of language models: tokens, who waits, and what memory holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pliant.deployments.serving.history import Past, of_tenants, tenants
from pliant.deployments.serving.panels import Chart, Panel, Readings, Stacks, Table

_COLUMNS = ("replica", "live", "waiting", "tokens/s", "step ms", "adapters in memory", "hits", "loads", "answers")


def readings(report: Mapping[str, Any]) -> Readings:
    """Of one replica's report."""
    adapters, memory = report.get("adapters", {}), report.get("memory", {})
    queues = report.get("classes", ())
    levels = {f"answers/{name}": float(report.get(name, 0)) for name in ("live", "waiting")}
    levels |= {f"queues/{number}": float(queue["waiting"]) for number, queue in enumerate(queues, 1)}
    levels["step ms"] = report.get("step_ms", 0.0)
    levels |= tenants(report)
    counters = {
        "served": ("answered", report.get("served", 0)),
        "admitted": ("admitted", sum(queue["admitted"] for queue in queues)),
        "waited_s": ("waited s", sum(queue["waited_s"] for queue in queues)),
        "prompts": ("prompts", report.get("prompts", 0)),
        "prompts_s": ("prompts s", report.get("prompts_s", 0.0)),
        "hits": ("adapters/in memory", adapters.get("hits", 0)),
        "misses": ("adapters/loaded first", adapters.get("misses", 0)),
        "hit": ("prefixes/there already", memory.get("hit", 0)),
        "missed": ("prefixes/computed", memory.get("missed", 0)),
    }
    return Readings(levels, counters)


def panels(view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
    """Of one service."""
    yield Chart("Answers under way", past.lines("answers/"), stacked=True)
    yield Chart("Answers that wait, by queue", past.lines("queues/"), stacked=True)
    yield from of_tenants(past, "Tokens that wait")
    first = {
        "wait for a slot": _means(past, "waited s", "admitted", 1e3),
        "prompt": _means(past, "prompts s", "prompts", 1e3),
    }
    yield Chart("Time to the first token, mean", first, unit="ms", stacked=True)
    yield Chart("Time between two tokens, mean", {"step": _means(past, "step ms", "replicas")}, unit="ms")
    yield Chart("Answers completed per second", {"answers": past.line("answered")})
    yield Chart("Tokens of prompts per second", past.lines("prefixes/"), stacked=True)
    yield Stacks(
        "Memory, by what holds it",
        {name: parts for name, report in sorted(view["replicas"].items()) if (parts := _memory(report))},
        unit="bytes",
    )
    if view.get("adapters"):
        yield Chart("Adapters asked for per second", past.lines("adapters/"), stacked=True)
        yield _adapters(report.get("adapters", {}) for report in view["replicas"].values())
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


def _adapters(reports: Iterable[Mapping[str, Any]]) -> Table:
    """The dozen that are used most, and by how many replicas they are held."""
    held: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    for report in reports:
        held.update(report.get("resident", ()))
        uses.update(report.get("hottest", {}))
    names = sorted(held.keys() | uses.keys(), key=lambda name: (-uses[name], -held[name], name))
    rows = [(name, uses[name], held[name]) for name in names[:12]]
    return Table("Adapters, most used first", ("adapter", "uses in 5 minutes", "replicas that hold it"), rows)


def _means(past: Past, sums: str, counts: str, times: float = 1.0) -> list[float]:
    """A line divided by another; 0 where that is."""
    pairs = zip(past.line(sums), past.line(counts), strict=True)
    return [times * value / count if count else 0.0 for value, count in pairs]


def _memory(report: Mapping[str, Any]) -> dict[str, float]:
    """What holds how many bytes of what pages and adapters may take; {} while that is not known."""
    if not (memory := report.get("memory")):
        return {}
    page_bytes = memory["page_bytes"]
    live, idle, whole = (memory[pages] * page_bytes for pages in ("live", "idle", "pages"))
    adapters = report["adapters"]["bytes"]
    free = max(0, whole - live - idle - adapters)
    return {"requests": live, "prefixes kept": idle, "adapters": adapters, "free": free}
