"""Sets of runtimes against the systems of Arlo's evaluation, under bursts of texts and of lengths: our targets.

Texts come in bursts, and lengths do (see `simulation.arrivals`), as the paper's Figures 1b and 4 show. Everybody knows
the same service times, and all that allocate know the demand of the stream; everybody may compute texts in batches, at
the size that serves it best. What INFaaS leaves open was set in its favour on streams of other seeds.

A load is the share of the replicas' time that the stream would take one by one, each text on the shortest runtime that
it fits into. Bursts have two and a half times the mean, so they fill the replicas at a mean of 0.4.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pliant.bench import workloads
from pliant.bench.encoder.profiles import BASE, Profile
from pliant.bench.encoder.schemes import Setting, arrived, simulation
from pliant.bench.encoder.simulated_runs import NAMES, Repeated, Runs, mean, ms, p98
from pliant.bench.report import Figure, ratio
from pliant.simulation.arrivals import Thinned, tweet_lengths
from pliant.simulation.encoder.outcome import Outcome

ALIKE = 0.3
"""How much lengths are alike within a tenth of a second."""
_WARMUP = 5
_LOAD = 1 / 3
BATCH = 32
"""The most texts of ours."""
PACKED_BEST = 8
"""Texts of INFaaS's batches: of 1, 4, 8 and 16, with which its latencies were least."""
_BATCHES = (1, 8)
"""Those with which a baseline's capacity is sought; it gets the greater."""
_ATTAINED = 0.98
_LEAST_LOAD, MOST_LOAD = 0.1, 1.3
_HALVINGS = 8
"""To within a hundredth, up to that load."""
_TARGETS = {"st": ">= 2.5", "dt": ">= 1.5", "infaas": ">= 1.2"}


def latencies(runs: Runs, found: Repeated, profile: Profile = BASE, case: str = "") -> None:
    """Mean and P98 at a load that all of INFaaS's replicas can carry; what homes are good for."""
    for gpus, seconds in runs.plan.latencies.items():
        for suffix, ours, theirs in (
            ("", Setting(profile, gpus, batch=BATCH), Setting(profile, gpus, batch=PACKED_BEST)),
            ("_one_by_one", Setting(profile, gpus), Setting(profile, gpus)),
        ):
            outcomes = {
                scheme: [_run(runs, scheme, setting, _LOAD, seconds, seed) for seed in runs.plan.seeds]
                for scheme, setting in (("sets", ours), ("no_homes", ours), ("infaas", theirs))
            }
            wanted = {"mean": "<= 0.7", "p98": "<= 0.6"} if not suffix else {}
            for what, measure in (("mean", mean), ("p98", p98)):
                for other, target in (("infaas", wanted.get(what, "")), ("no_homes", "<= 1.0" if not suffix else "")):
                    name = f"sim_{what}_vs_{other}_{gpus}_gpus{suffix}{case}"
                    found.figures.append(_compare(name, measure, outcomes["sets"], outcomes[other], target))


def capacities(runs: Runs, found: Repeated, profile: Profile = BASE, case: str = "", most: float = MOST_LOAD) -> None:
    """The greatest load, up to `most` with batches, of which 98% is answered within the SLO."""
    for gpus, seconds in runs.plan.capacities.items():
        for suffix, batch, batches, high in (("", BATCH, _BATCHES, most), ("_one_by_one", 1, (1,), MOST_LOAD)):
            seeds = runs.plan.seeds[::3]
            capacity = partial(_capacity, runs, seconds=seconds, most=high)
            ours = [capacity("sets", Setting(profile, gpus, batch=batch), seed) for seed in seeds]
            for scheme, target in _TARGETS.items():
                settings = [Setting(profile, gpus, batch=batch) for batch in batches]
                theirs = [max(capacity(scheme, setting, seed) for setting in settings) for seed in seeds]
                beside = (
                    f"load {statistics.median(ours):.2f} against {statistics.median(theirs):.2f} of {NAMES[scheme]}"
                )
                name = f"capacity_within_slo_vs_{scheme}_{gpus}_gpus{suffix}{case}"
                found.figures.append(ratio(name, ours, theirs, "" if suffix else target, beside))


def _run(
    runs: Runs, scheme: str, setting: Setting, load: float, seconds: int, seed: int, high: float = MOST_LOAD
) -> Outcome:
    """At all loads up to `high` bursts come at the same times, so that more load is never easier."""
    rate = high * setting.replicas / setting.profile.mean_static_s(tweet_lengths())
    most = workloads.twitter(runs.data, rate, _WARMUP + seconds, seed, bursty=True, alike=ALIKE)
    stream = Thinned(most, load / high)
    known = replace(setting, demand=arrived(setting.lengths, stream))
    return simulation(scheme, known).run(stream, _WARMUP)


def _capacity(runs: Runs, scheme: str, setting: Setting, seed: int, seconds: int, most: float) -> float:
    low, high = _LEAST_LOAD, most
    for _ in range(_HALVINGS):
        load = (low * high) ** 0.5
        attained = _run(runs, scheme, setting, load, seconds, seed, most).attainment >= _ATTAINED
        low, high = (load, high) if attained else (low, load)
    return low


def _compare(
    name: str, measure: Callable[[Outcome], float], ours: Sequence[Outcome], theirs: Sequence[Outcome], target: str
) -> Figure:
    mine, others = [measure(outcome) for outcome in ours], [measure(outcome) for outcome in theirs]
    ratios = ", ".join(f"{one / other:.2f}" for one, other in zip(mine, others, strict=True))
    beside = f"{ms(statistics.median(mine))} against {ms(statistics.median(others))} ms; seeds: {ratios}"
    return ratio(name, mine, others, target, beside)
