"""OTAS, repeated and measured: token adaptation, in simulation and on the live engine (OTAS §V)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from pliant.bench.findings import Findings
from pliant.bench.gpu.profiles import measured_vision
from pliant.bench.report import Options, Report, paper_and_here
from pliant.bench.vision import decisions, digits, live, merging, profiles, real_tasks, second_passes, simulated
from pliant.bench.vision.profiles import Profile
from pliant.bench.vision.runs import Runs
from pliant.bench.vision.second_passes import Known
from pliant.bench.vision.simulated import Scale
from pliant.errors import DataError

PARTS = ("paper", "digits", "real", "gpu", "decisions", "merging", "live")
"""Simulations of devices, the plan's decisions, the speed of merging, and the live engine."""


class _Device(NamedTuple):
    """What is simulated."""

    profile: Profile
    scale: Scale
    suffix: str
    answers: Callable[[], Known] | None = None
    """To images that may run again; None where only accuracies are known."""


@dataclass(frozen=True)
class _Plan:
    paper: Scale
    """For the paper's machine."""
    here: Scale
    """For machines that may be many times as fast: as many queries come in less time."""
    decisions: int
    """Repetitions for each kind of queue."""
    instances: tuple[int, float]
    """How many are compared with the optimum, and seconds for each to find it."""


_QUICK = _Plan(
    paper=Scale(synthetic_s=60, replay_s=60, part_s=20),
    here=Scale(synthetic_s=10, replay_s=10, part_s=4),
    decisions=10,
    instances=(3, 4.0),
)
_FULL = _Plan(
    paper=Scale(synthetic_s=600, replay_s=3600, part_s=60, loads=(0.8, 1.0, 1.25, 1.5, 2.0, 3.0)),
    here=Scale(synthetic_s=40, replay_s=100, part_s=10),
    decisions=100,
    instances=(18, 30.0),
)


def run(options: Options) -> Report:
    """All of it, or what `options.cells` names, into one report; the table "paper / here" is printed.

    Raises DataError for a name that is none of PARTS, or a part that was named and lacks what it measures.
    """
    wanted = options.chosen(PARTS, "parts")
    for named, needed, given in (("real", "--data", options.data), ("gpu", "--gpu", options.gpu)):
        if options.cells and named in wanted and given is None:
            raise DataError(f"--cells {named} needs {needed}")
    plan = _QUICK if options.quick else _FULL
    found = Findings()
    with Progress(transient=True) as progress:
        task = progress.add_task("profiles", total=None)
        devices = [_Device(profiles.paper(), plan.paper, "")] if "paper" in wanted else []
        if "digits" in wanted:
            devices.append(_Device(digits.profile(), plan.here, "_digits", digits.answers))
        if "real" in wanted and (real := real_tasks.profile(options)) is not None:
            devices.append(_Device(real, plan.here, "_real", partial(real_tasks.answers, options)))
        if "gpu" in wanted and options.gpu:
            devices.append(_Device(measured_vision(options.gpu), plan.here, "_gpu"))
        progress.update(task, description="simulated runs")
        with Runs(lambda: progress.advance(task)) as runs:
            for profile, scale, suffix, answers in devices:
                found.add(simulated.repeat(runs, profile, scale, options.data, suffix))
                if answers:
                    found.add(second_passes.compare(runs, profile, answers(), scale.synthetic_s, suffix))
        if "decisions" in wanted:
            progress.update(task, description="decisions")
            found.add(decisions.decision_ms(profiles.paper(), plan.decisions))
            found.add(decisions.fraction_of_offline_optimum(profiles.paper(), *plan.instances))
        for name, part in (("real", real_tasks), ("merging", merging), ("live", live)):
            if name in wanted:
                progress.update(task, description=name)
                found.add(part.compare(options))
    Console().print(paper_and_here("OTAS's evaluation, repeated", found.rows))
    rows = [row._asdict() for row in found.rows]
    config = {**asdict(plan), "profiles": [_told(device.profile) for device in devices], "paper_and_here": rows}
    return Report(found.figures, config, found.plots)


def _told(profile: Profile) -> dict[str, object]:
    """What a profile comes to."""
    return {
        "name": profile.name,
        "per_s": {gamma: round(profile.per_s(gamma), 1) for gamma in profile.gammas},
        "accuracies": profile.accuracies,
    }
