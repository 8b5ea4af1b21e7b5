"""What is still answered in time when twice as much is asked as can be, in each kind's engine, without Ray.

The capacity is the most that is answered in time at any load, up to half as much again as can be done. Nobody comes
back after a refusal.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from rich.progress import track

from pliant.bench.report import Figure, Options, Report, median, ratio
from pliant.bench.tenants import encoder, llm, vision
from pliant.bench.tenants.load import Found, steady

_KINDS = {"encoder": encoder, "llm": llm, "vision": vision}
_LOADS = (0.8, 1.0, 1.2, 1.5)
_OVERLOAD = 2.0


@dataclass(frozen=True)
class _Plan:
    blocks: int
    seconds: float
    seed: int = 0


_QUICK = _Plan(blocks=3, seconds=10.0)
_FULL = _Plan(blocks=3, seconds=120.0)


def run(options: Options) -> Report:
    """Each kind at each load, for so many blocks."""
    plan = _QUICK if options.quick else _FULL
    found: dict[tuple[str, float], list[Found]] = {}
    todo = [(kind, block, load) for kind in _KINDS for block in range(plan.blocks) for load in (*_LOADS, _OVERLOAD)]
    for kind, block, load in track(todo, description="overload"):
        work = steady(load, _KINDS[kind].WORK, plan.seconds, plan.seed + block)
        found.setdefault((kind, load), []).append(_KINDS[kind].serve(work))
    figures = [
        figure
        for kind in _KINDS
        for figure in _figures(kind, plan.seconds, {load: found[kind, load] for load in (*_LOADS, _OVERLOAD)})
    ]
    per_s = {
        f"{kind} at {load:g}": [round(each.per_s(plan.seconds), 2) for each in blocks]
        for (kind, load), blocks in found.items()
    }
    return Report(figures, {**asdict(plan), "loads": [*_LOADS, _OVERLOAD], "in_time_per_s": per_s}, {})


def _figures(kind: str, seconds: float, found: dict[float, list[Found]]) -> list[Figure]:
    capacity = [
        max(each.per_s(seconds) for each in blocks) for blocks in zip(*(found[load] for load in _LOADS), strict=True)
    ]
    over = found[_OVERLOAD]
    slo_ms = 1e3 * _KINDS[kind].SLO_S
    late = [each.p98_ms() / slo_ms for each in over]
    beside = f"{capacity[0]:.1f}/s; answered {len(over[0].latencies)} of {over[0].asked}"
    return [
        ratio(f"{kind}_goodput_share", [each.per_s(seconds) for each in over], capacity, ">= 0.95", beside),
        median(f"{kind}_p98_of_accepted_vs_slo", [value if math.isfinite(value) else 0.0 for value in late], "<= 1"),
    ]
