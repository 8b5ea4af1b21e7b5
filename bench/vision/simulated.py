"""OTAS's evaluation, repeated in the simulator: figures 9 to 13, and what they must show (§V)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pliant.bench.findings import Findings
from pliant.bench.report import Figure, Row
from pliant.bench.vision import plots, workload
from pliant.bench.vision.profiles import Profile
from pliant.bench.vision.runs import BLOCKS, Compared, Runs
from pliant.bench.vision.systems import (
    ALGORITHM_2,
    ALGORITHM_2_BATCHES,
    OURS,
    OURS_AT_0,
    PETS,
    PETS_NEVER_EVICTING,
    Choice,
    fixed,
    infaas,
    slackfits,
)
from pliant.bench.vision.workload import Trace
from pliant.simulation.vision.outcome import Fate, Outcome

_SEED = 0
_CHOICES = tuple(
    Choice(load, window_s, hold_s) for load in (0.65, 0.9) for window_s, hold_s in ((0.5, 0.0), (2.0, 0.0), (2.0, 30.0))
)
_AS_PUBLISHED = Choice(0.65, 0.5, 0.0)
"""What OTAS itself follows the rate with; nothing keeps it from going back and forth."""
_PAPER = {
    "synthetic": {"pets": "1.182", "infaas": "1.725", "type1": "85.5%", "gamma": "8, then -15"},
    "replay": {"pets": "up to 1.901", "infaas": "up to 1.901", "type1": "75.6%", "gamma": "8, then -15"},
}
_UNSTATED = {"pets": "", "infaas": "", "type1": "", "gamma": ""}
_TARGETS = {
    "synthetic": {"pets": ">= 1.182", "infaas": ">= 1.725", "slackfit": "", "type1": ">= 0.85"},
    "replay": {"pets": ">= 1.3", "infaas": ">= 1.3", "slackfit": "", "type1": ">= 0.75"},
    "calibrated_synthetic": {"pets": ">= 1.18", "infaas": "", "slackfit": ">= 1.05", "type1": ""},
    "calibrated_replay": {"pets": ">= 1.18", "infaas": "", "slackfit": ">= 1.05", "type1": ""},
}


@dataclass(frozen=True)
class Scale:
    """Seconds of the traces, and of the parts of them that settings are looked for and bounds are proven on."""

    synthetic_s: int
    replay_s: int
    part_s: int
    loads: Sequence[float] = ()
    """By which the synthetic load is multiplied, to see from where on what helps."""


def repeat(runs: Runs, profile: Profile, scale: Scale, data: Path | None, suffix: str = "") -> Findings:
    """All of it on one device; `suffix` is appended to the names of figures and plots."""
    traces = {
        "synthetic": workload.synthetic(scale.synthetic_s, _SEED),
        "replay": workload.replay(data, scale.replay_s, _SEED),
    }
    for name, trace in tuple(traces.items()):
        traces[f"calibrated_{name}"] = trace.peaking_at(workload.CALIBRATED_PEAK)
    every = [compare(runs, profile, name, trace, scale.part_s) for name, trace in traces.items()]
    found = Findings()
    for compared in every:
        found.add(_figures(compared, suffix))
        found.rows += _rows(compared, profile)
    found.figures += _overall(every, suffix)
    if scale.loads:
        found.add(_loads(runs, profile, scale, suffix))
    for name, plot in plots.evaluation(profile, every).items():
        found.plots[f"{name}{suffix}"] = plot
    return found


def compare(runs: Runs, profile: Profile, name: str, trace: Trace, part_s: int) -> Compared:
    """All systems on one trace."""
    part = trace.first(part_s)
    tried = runs.all(profile, [*infaas(_CHOICES), *slackfits()], part)
    best = max(infaas(_CHOICES), key=lambda system: tried[system.name].utility)
    slackfit = max(slackfits(), key=lambda system: tried[system.name].utility)
    (published,) = infaas([_AS_PUBLISHED])
    every = [PETS, *fixed(profile)]
    others = (
        *(OURS, ALGORITHM_2, ALGORITHM_2_BATCHES, PETS_NEVER_EVICTING, slackfit),
        *dict.fromkeys((best, published)),
    )
    outcomes = runs.all(profile, (*others, *every), trace)
    best_fixed = max(every, key=lambda system: outcomes[system.name].utility)
    expected = runs.all(profile, [OURS], part)[OURS.name].expected
    return Compared(name, trace, outcomes, best, slackfit, best_fixed, runs.bound(profile, part) / expected)


def _figures(this: Compared, suffix: str) -> Findings:
    found = Findings()
    targets = _TARGETS[this.workload]
    for figure, system in (("pets", PETS.name), ("infaas", this.infaas.name), ("slackfit", this.slackfit.name)):
        value, blocks = this.versus(system)
        theirs = this.outcomes[system]
        most = this.bound * this.ours.expected / theirs.expected
        beside = f"{_earned(this.ours)} against {_earned(theirs)} ({system}); the bound is {most:.3f}"
        name = f"utility_vs_{figure}_{this.workload}{suffix}"
        found.figures.append(Figure(name, value, min(blocks), max(blocks), targets[figure], beside))
    shares = this.ours.shares(Fate.RIGHT, BLOCKS)
    others = ", ".join(f"{name} {this.outcomes[name].share(Fate.RIGHT):.3f}" for name in (PETS.name, this.infaas.name))
    name = f"type1_share_{this.workload}{suffix}"
    value = this.ours.share(Fate.RIGHT)
    found.figures.append(Figure(name, value, min(shares), max(shares), targets["type1"], others))
    return found


def _overall(every: Sequence[Compared], suffix: str) -> list[Figure]:
    fixed_gammas = [this.versus(this.best_fixed.name) for this in every]
    algorithms = (ALGORITHM_2.name, ALGORITHM_2_BATCHES.name)
    published = [this.versus(name) for this in every for name in algorithms]
    most = [this.bound * this.ours.expected / this.outcomes[this.best_fixed.name].expected for this in every]
    named = ", ".join(
        f"{this.workload} {value:.3f} against {this.best_fixed.name} (the bound is {limit:.3f})"
        for this, (value, _), limit in zip(every, fixed_gammas, most, strict=True)
    )
    apart = (
        ", ".join(f"{this.workload} {' and '.join(f'{this.over(name):.3f}' for name in algorithms)}" for this in every)
        + "; as published, and on our batches"
    )
    fractions = [1 / this.bound for this in every]
    bounds = ", ".join(f"{this.workload} {1 / this.bound:.4f}" for this in every)
    return [
        _least(f"utility_vs_best_fixed{suffix}", fixed_gammas, "> 1.05", named),
        _least(f"exact_vs_algorithm2_utility{suffix}", published, ">= 1.0", apart),
        Figure(f"fraction_of_fluid_bound{suffix}", min(fractions), min(fractions), max(fractions), beside=bounds),
    ]


def _least(name: str, versus: Sequence[tuple[float, list[float]]], target: str, beside: str) -> Figure:
    """The figure of the workload on which we are the least better."""
    blocks = [block for _, each in versus for block in each]
    return Figure(name, min(value for value, _ in versus), min(blocks), max(blocks), target, beside)


def _rows(this: Compared, profile: Profile) -> list[Row]:
    paper = _PAPER.get(this.workload, _UNSTATED) if profile.name == "paper" else _UNSTATED
    where = f"{this.workload}, {profile.name}"
    (published,) = infaas([_AS_PUBLISHED])
    lines = [
        ("PetS", paper["pets"], PETS.name),
        ("PetS that never evicts", paper["pets"], PETS_NEVER_EVICTING.name),
        ("INFaaS at its best", paper["infaas"], this.infaas.name),
        ("INFaaS that follows the rate at once", paper["infaas"], published.name),
        ("SlackFit at its best", "", this.slackfit.name),
        ("Algorithm 2", "", ALGORITHM_2.name),
        (ALGORITHM_2_BATCHES.name, "", ALGORITHM_2_BATCHES.name),
        *((f"{name}", "(plot only)", name) for name in this.outcomes if name.startswith(("ToMe", "VPT"))),
    ]
    rows = [Row(f"Utility over that of {who}, {where}", value, f"{this.over(name):.3f}") for who, value, name in lines]
    gammas = this.ours.gammas()
    most = ", ".join(
        f"{gamma:+d} {share:.0%}" for gamma, share in sorted(gammas.items(), key=lambda each: -each[1])[:3]
    )
    fates = ", ".join(f"{this.ours.share(fate):.1%}" for fate in Fate)
    return [
        *rows,
        Row(f"Types 1 to 4 of ours, {where}", f"{paper['type1']} type 1", fates),
        Row(f"Gammas most used, {where}", paper["gamma"], most),
    ]


def _loads(runs: Runs, profile: Profile, scale: Scale, suffix: str) -> Findings:
    """From which load on what helps: the synthetic load, multiplied."""
    found = Findings()
    lines: dict[str, list[float]] = {PETS.name: [], OURS_AT_0.name: [], "best fixed gamma": [], "bound": []}
    for load in scale.loads:
        trace = workload.synthetic(scale.part_s, _SEED, load)
        every = [PETS, *fixed(profile)]
        outcomes = runs.all(profile, (OURS, OURS_AT_0, *every), trace)
        ours = outcomes[OURS.name].expected
        lines[PETS.name].append(ours / outcomes[PETS.name].expected)
        lines[OURS_AT_0.name].append(ours / outcomes[OURS_AT_0.name].expected)
        lines["best fixed gamma"].append(ours / max(outcomes[system.name].expected for system in every))
        lines["bound"].append(ours / runs.bound(profile, trace))
    found.plots[f"loads{suffix}"] = plots.by_load(scale.loads, lines)
    for name, values in lines.items():
        here = ", ".join(f"{value:.3f} at {load:g}" for load, value in zip(scale.loads, values, strict=True))
        found.rows.append(Row(f"Utility over that of {name}, load times, {profile.name}", "", here))
    return found


def _earned(outcome: Outcome) -> str:
    return f"{outcome.utility / outcome.offered:.3f} of all utility"
