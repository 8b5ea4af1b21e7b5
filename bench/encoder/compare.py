"""Arlo, live and simulated: what runtimes per length gain, how replicas follow demand, the paper repeated (Arlo §5)."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.progress import Progress

from pliant.bench.cluster import cluster
from pliant.bench.encoder import allocation_rate, batching_rate, embeddings, fidelity, live, reassignment
from pliant.bench.encoder.live import MODEL, RESERVED
from pliant.bench.encoder.simulated import simulate_paper
from pliant.bench.load import session
from pliant.bench.report import Figure, Options, Report, paper_and_here
from pliant.models import sources

_ALLOCATION_REPEATS = 5
_MOVED_REQUESTS = (1_500, 5_000)
_FIDELITY = ((1, 20), (3, 60))
"""Runs of the live cluster that the simulator repeats, and the seconds of each. Both: quick, and in full."""


def run(options: Options) -> Report:
    """All of it, into one report; the table "paper / here" is printed."""
    with Progress(transient=True) as progress:
        task = progress.add_task(MODEL, total=1.0)
        sources.fetch(MODEL, progress=lambda text, done: progress.update(task, description=text, completed=done))
    compared = live.compare(options)
    moved = _live_planner(options)
    simulated = simulate_paper(options)
    Console().print(paper_and_here("Arlo's evaluation, repeated in simulation", simulated.rows))
    figures = [*compared.figures, *moved, *simulated.figures, *allocation_rate.figures(_ALLOCATION_REPEATS)]
    figures += batching_rate.figures()
    figures += embeddings.figures(options.data)
    rows = [row._asdict() for row in simulated.rows]
    return Report(figures, {**compared.config, "paper_and_here": rows}, {**compared.plots, **simulated.plots})


def _live_planner(options: Options) -> list[Figure]:
    """Replicas that move under load, and the simulator beside a live cluster."""
    gpus = int(options.device == "cuda")
    applications = {
        "moving": reassignment.application(MODEL, {"cpus": RESERVED, "gpus": gpus * RESERVED}),
        "timed": fidelity.application(MODEL, RESERVED),
    }

    async def measure(address: str) -> list[Figure]:
        async with session() as http:
            requests = _MOVED_REQUESTS[not options.quick]
            outcome = await reassignment.measure(http, f"{address}/moving", requests)
            errors = await fidelity.figures(http, f"{address}/timed", MODEL, *_FIDELITY[not options.quick])
        return [*reassignment.figures(outcome), *errors]

    with cluster(applications, gpus) as address:
        return asyncio.run(measure(address))
