"""The figures of starts: each is what one took, divided by what bare Ray Serve took beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pliant.bench.report import Figure, median, ratio
from pliant.bench.start.timeline import Timeline


@dataclass(frozen=True)
class Start:
    """When services answered, and the memory when there was nothing left to do."""

    timeline: Timeline
    cpu_s: float
    """Processor seconds of all processes until all was ready."""
    memory_gb: Mapping[str, float]
    """By kind of process."""

    @property
    def total_gb(self) -> float:
        """Of all processes."""
        return sum(self.memory_gb.values())

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "answered_s": {name: round(seconds, 2) for name, seconds in self.timeline.answered.items()},
            "ready_s": round(self.timeline.ready, 2),
            "cpu_s": round(self.cpu_s, 1),
            "memory_pss_gb": {name: round(size, 3) for name, size in sorted(self.memory_gb.items())},
        }


@dataclass(frozen=True)
class Round:
    """Starts side by side: bare Ray Serve's, ours with an empty cache, and ours with what that one left in it."""

    bare: Start
    first: Start
    second: Start

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {"bare": self.bare.facts(), "first": self.first.facts(), "second": self.second.facts()}


def figures(rounds: Sequence[Round]) -> list[Figure]:
    """Seconds and memory; the targets are those of the first ones."""
    firsts = [one.first.timeline for one in rounds]
    seconds = [one.second.timeline for one in rounds]
    bare = [one.bare.timeline.first for one in rounds]

    def against(name: str, ours: Sequence[float], target: str = "") -> Figure:
        beside = f"{statistics.median(ours):.3g} s, bare Serve {statistics.median(bare):.3g} s"
        return ratio(name, ours, bare, target, beside)

    services = [
        against(f"{name}_vs_bare_serve_{which}", [one.answered[name] for one in timelines])
        for name in firsts[0].answered
        for which, timelines in (("first", firsts), ("second", seconds))
    ]
    return [
        against("first_answer_vs_bare_serve", [one.first for one in firsts], "<= 3"),
        against("all_ready_vs_bare_serve_first", [one.ready for one in firsts], "<= 15"),
        against("all_ready_vs_bare_serve_second", [one.ready for one in seconds], "<= 3"),
        _memory(rounds),
        *services,
    ]


def _memory(rounds: Sequence[Round]) -> Figure:
    second = statistics.median(one.second.total_gb for one in rounds)
    bare = statistics.median(one.bare.total_gb for one in rounds)
    beside = f"after a first start; after a second {second:.3g}, bare Serve {bare:.3g}"
    return median("memory_pss_gb", [one.first.total_gb for one in rounds], "<= 3", beside)
