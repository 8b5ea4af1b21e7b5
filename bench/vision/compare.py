"""OTAS, repeated and measured: token adaptation, in simulation and on the live engine (OTAS §V)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress

from pliant.bench.findings import Findings
from pliant.bench.gpu.profiles import measured_vision
from pliant.bench.report import Options, Report, paper_and_here
from pliant.bench.vision import decisions, digits, live, merging, profiles, real_tasks, second_passes, simulated
from pliant.bench.vision.profiles import Profile
from pliant.bench.vision.runs import Runs
from pliant.bench.vision.simulated import Scale


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
    """All of it, into one report; the table "paper / here" is printed."""
    plan = _QUICK if options.quick else _FULL
    found = Findings()
    with Progress(transient=True) as progress:
        task = progress.add_task("profiles", total=None)
        devices = [(profiles.paper(), plan.paper, ""), (digits.profile(), plan.here, "_digits")]
        if (real := real_tasks.profile(options)) is not None:
            devices.append((real, plan.here, "_real"))
        if options.gpu:
            devices.append((measured_vision(options.gpu), plan.here, "_gpu"))
        progress.update(task, description="simulated runs")
        with Runs(lambda: progress.advance(task)) as runs:
            for profile, scale, suffix in devices:
                found.add(simulated.repeat(runs, profile, scale, options.data, suffix))
            zoo, scale, suffix = devices[1]
            found.add(second_passes.compare(runs, zoo, digits.answers(), scale.synthetic_s, suffix))
        progress.update(task, description="decisions")
        found.add(decisions.decision_ms(profiles.paper(), plan.decisions))
        found.add(decisions.fraction_of_offline_optimum(profiles.paper(), *plan.instances))
        progress.update(task, description="live")
        for part in (real_tasks, merging, live):
            found.add(part.compare(options))
    Console().print(paper_and_here("OTAS's evaluation, repeated", found.rows))
    rows = [row._asdict() for row in found.rows]
    config = {**asdict(plan), "profiles": [_told(profile) for profile, _, _ in devices], "paper_and_here": rows}
    return Report(found.figures, config, found.plots)


def _told(profile: Profile) -> dict[str, object]:
    """What a profile comes to."""
    return {
        "name": profile.name,
        "per_s": {gamma: round(profile.per_s(gamma), 1) for gamma in profile.gammas},
        "accuracies": profile.accuracies,
    }
