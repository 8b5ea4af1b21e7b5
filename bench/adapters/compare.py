"""Chameleon, repeated and measured: many adapters, in simulation and on the live engine (Chameleon §5)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import Progress

from pliant.bench.adapters import live, overhead, scaling, simulated
from pliant.bench.adapters.runs import SCALE, Case, Runs
from pliant.bench.adapters.simulated import Scale
from pliant.bench.findings import Findings
from pliant.bench.gpu.profiles import measured_gpu
from pliant.bench.report import Options, Report, paper_and_here
from pliant.simulation.llm import hardware


@dataclass(frozen=True)
class _Plan:
    main: Scale
    """For the paper's A40."""
    others: Scale
    """For other machines, models and loads."""
    overhead: tuple[int, int]
    """Steps of a measurement, and repetitions."""
    live: live.Scale


_QUICK = _Plan(
    main=Scale(seconds=180, seeds=(0, 1), rounds=6, loads=(0.69, 1.03, 1.3)),
    others=Scale(seconds=90, seeds=(0,), rounds=5, loads=()),
    overhead=(10, 3),
    live=live.Scale(seconds=6, repetitions=1),
)
_FULL = _Plan(
    main=Scale(seconds=600, seeds=(0, 1, 2, 3, 4), rounds=8, loads=(0.5, 0.69, 0.8, 0.92, 1.0, 1.03, 1.2, 1.4)),
    others=Scale(seconds=300, seeds=(0, 1, 2), rounds=7, loads=()),
    overhead=(20, 9),
    live=live.Scale(seconds=30, repetitions=3),
)


def run(options: Options) -> Report:
    """All of it, into one report; the table "paper / here" is printed."""
    plan = _QUICK if options.quick else _FULL
    case = Case(data=options.data)
    gpu = measured_gpu(options.gpu) if options.gpu else None
    threads = torch.get_num_threads()
    found = Findings()
    with Progress(transient=True) as progress:
        task = progress.add_task("simulated runs", total=None)
        with Runs(lambda: progress.advance(task)) as runs:
            found.add(simulated.repeat(runs, plan.main, case))
            found.add(scaling.repeat(runs, plan.others, case))
            found.add(scaling.sensitivity(runs, plan.others, case, gpu))
        progress.update(task, description="live")
        found.figures += overhead.measure(threads, *plan.overhead)
        found.figures += live.compare(plan.live, options.data, threads)
    Console().print(paper_and_here("Chameleon's evaluation, repeated", found.rows))
    rows = [row._asdict() for row in found.rows]
    config = {**asdict(plan), "threads": threads, "costs": _costs(), "length_scale": SCALE, "paper_and_here": rows}
    return Report(found.figures, config, found.plots)


def _costs() -> dict[str, object]:
    """What the simulation takes things to cost, in the main case."""
    costs = Case().costs
    shares = (hardware.MEMORY_SHARE, hardware.BANDWIDTH_SHARE, hardware.FLOPS_SHARE)
    names = ("memory_share", "bandwidth_share", "flops_share", "adapter_flop")
    return {**asdict(costs), **dict(zip(names, (*shares, hardware.ADAPTER_FLOP), strict=True))}
