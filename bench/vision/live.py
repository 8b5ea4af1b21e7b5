"""The live engine on a CPU under a load that swings: ours against one gamma for all (OTAS §V; figures 8 to 10, 12, 13).

The engine, its queue, its policies and the kernels are the service's own; only Ray is not there. Utility is earned by
right answers to images that nothing has seen before.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.bench.findings import Findings
from pliant.bench.report import Figure, Options, Row, median, ratio
from pliant.bench.vision import live_plots, workload
from pliant.bench.vision.live_models import open_service
from pliant.bench.vision.live_run import ALGORITHM_2, OURS, Served, System, fixed, serve, with_images
from pliant.bench.vision.live_service import Service, capacity, roles
from pliant.simulation.vision.outcome import Fate

_PETS = fixed(0)


@dataclass(frozen=True)
class Scale:
    """Seconds of each run, and of the runs that choose fixed gammas; and how often each system runs."""

    seconds: int
    choice_s: int
    repetitions: int


_QUICK = Scale(seconds=6, choice_s=3, repetitions=2)
_FULL = Scale(seconds=10, choice_s=5, repetitions=10)

Runs = Mapping[str, Sequence[Served]]
"""System -> its runs; those with the same place had the same queries and ran one after the other."""


def compare(options: Options) -> Findings:
    """Ours, Algorithm 2, PetS, and the best of merging and of prompts, in turn and in another order each time.

    The load is anywhere between 0.35 and 1.2 of what gamma 0 takes, which is measured before each round.
    """
    return asyncio.run(_compare(options, _QUICK if options.quick else _FULL))


async def _compare(options: Options, scale: Scale) -> Findings:
    service = await open_service(options)
    merging, prompting = await _best_fixed(service, scale.choice_s)
    systems = [OURS, ALGORITHM_2, _PETS, merging, prompting]
    runs: dict[str, list[Served]] = {system.name: [] for system in systems}
    rates = []
    for repetition in range(scale.repetitions):
        rates.append(await capacity(service))
        for name, served in (await _round(service, systems, rates[-1], scale.seconds, repetition)).items():
            runs[name].append(served)
    load = workload.synthetic(scale.seconds, scale.repetitions - 1)
    return _findings(service, runs, rates, load)


async def _best_fixed(service: Service, seconds: int) -> tuple[System, System]:
    """The gamma below 0 and the one above that earn most, each in one run on the same queries."""
    candidates = [fixed(gamma) for gamma in service.gammas if gamma]
    served = await _round(service, candidates, await capacity(service), seconds, seed=-1 % 2**32)
    gammas = sorted((gamma for gamma in service.gammas if gamma), key=lambda g: served[fixed(g).name].outcome.utility)
    below, above = ([gamma for gamma in gammas if (gamma < 0) == merges][-1] for merges in (True, False))
    return fixed(below), fixed(above)


async def _round(
    service: Service, systems: Sequence[System], per_s: float, seconds: int, seed: int
) -> dict[str, Served]:
    """All systems on the same queries."""
    queries = workload.synthetic(seconds, seed).queries(per_s, roles(service))
    asked = with_images(queries, service, seed)
    order = random.Random(seed).sample(systems, len(systems))
    return {system.name: await serve(service, system, asked) for system in order}


def _findings(service: Service, runs: Runs, rates: Sequence[float], last: workload.Trace) -> Findings:
    earned = {name: [run.outcome.utility for run in served] for name, served in runs.items()}
    best_fixed = [max(earned[name][place] for name in _fixed(runs)) for place in range(len(rates))]
    type1 = {name: [run.outcome.share(Fate.RIGHT) for run in served] for name, served in runs.items()}
    shown = ", ".join(f"{name} {statistics.median(values):.0f}" for name, values in earned.items())
    beside = f"{service.about}; {statistics.median(rates):.0f}/s at gamma 0; utility: {shown}"
    beside_type1 = ", ".join(f"{name} {statistics.median(values):.3f}" for name, values in type1.items())
    figures: list[Figure] = [
        ratio("utility_vs_pets_live", earned[OURS.name], earned[_PETS.name], "> 1", beside),
        ratio("utility_vs_best_fixed_live", earned[OURS.name], best_fixed, "> 1", "the best of each round"),
        ratio("exact_vs_algorithm2_utility_live", earned[OURS.name], earned[ALGORITHM_2.name], ">= 1"),
        median("type1_share_live", type1[OURS.name], "", beside_type1),
        median("decision_ms_p99_live", [run.decision_ms for run in runs[OURS.name]], "<= 5"),
    ]
    rows = [
        Row(f"live, types 1 to 4: {name}", _PAPER.get(name, ""), " / ".join(f"{share:.1%}" for share in shares))
        for name, shares in _types(runs).items()
    ]
    plots = {
        "gamma-live": live_plots.gammas(last.loads, runs[OURS.name][-1].gammas),
        "types-live": live_plots.types(_types(runs)),
    }
    return Findings(figures, rows, plots)


_PAPER = {OURS.name: "type 1: 85.5%"}


def _fixed(runs: Runs) -> list[str]:
    return [name for name in runs if name not in (OURS.name, ALGORITHM_2.name)]


def _types(runs: Runs) -> dict[str, list[float]]:
    """The shares of types 1 to 4 by system, over all its runs."""
    return {
        name: [statistics.fmean(run.outcome.share(fate) for run in served) for fate in Fate]
        for name, served in runs.items()
    }
