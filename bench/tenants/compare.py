"""What is left of a tenant's answers when another asks for ten times its share, in each kind's engine, without Ray.

One asks for three fifths of its share; the other sends the longest requests, takes answers an hour later, and says of
its images that they are worth a million times as much. Beside it the same with both as one tenant.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.progress import track

from pliant.bench.report import Figure, Options, Report, ratio
from pliant.bench.tenants import encoder, llm, vision
from pliant.bench.tenants.load import GREEDY_LOAD, MODES, MODEST_LOAD, Found, Mode, requests

_KINDS = {"encoder": encoder, "llm": llm, "vision": vision}


@dataclass(frozen=True)
class _Plan:
    blocks: int
    seconds: float
    seed: int = 0


_QUICK = _Plan(blocks=3, seconds=12.0)
_FULL = _Plan(blocks=5, seconds=40.0)


def run(options: Options) -> Report:
    """Each kind, for so many blocks in each of the three modes."""
    plan = _QUICK if options.quick else _FULL
    found: dict[tuple[str, Mode], list[Found]] = {}
    todo = [(kind, block, mode) for kind in _KINDS for block in range(plan.blocks) for mode in MODES]
    for kind, block, mode in track(todo, description="two tenants"):
        system = _KINDS[kind]
        work = requests(mode, system.WORK, plan.seconds, plan.seed + block)
        found.setdefault((kind, mode), []).append(system.serve(work))
    figures = [figure for kind in _KINDS for figure in _figures(kind, {mode: found[kind, mode] for mode in MODES})]
    slo_s = {kind: system.SLO_S for kind, system in _KINDS.items()}
    config = {**asdict(plan), "modest_load": MODEST_LOAD, "greedy_load": GREEDY_LOAD, "slo_s": slo_s}
    return Report(figures, config, {})


def _figures(kind: str, found: dict[Mode, list[Found]]) -> list[Figure]:
    alone, shared, as_one = ([block.goodput for block in found[mode]] for mode in MODES)
    p98 = {mode: ", ".join(f"{block.p98_ms():.0f}" for block in found[mode]) for mode in MODES}
    theirs = sum(block.greedy for block in found["shared"])
    beside = f"P98 {p98['shared']} ms, alone {p98['alone']} ms; the other had {theirs} answers"
    return [
        ratio(f"{kind}_victim_goodput_vs_alone", shared, alone, ">= 0.9", beside),
        ratio(f"{kind}_victim_goodput_as_one_tenant_vs_alone", as_one, alone, "", f"P98 {p98['as_one']} ms"),
    ]
