"""One budget of six places against fixed splits of it, on a real cluster: a load that moves from texts to images to
chat. Places only let time pass, so that they and not the machine's cores are what is scarce.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import matplotlib.pyplot as plt
import yaml
from matplotlib.figure import Figure as Plot
from rich.progress import Progress

from pliant import haproxy, ray_settings
from pliant.bench.budget import clients, models, shift
from pliant.bench.budget.clients import Seen
from pliant.bench.budget.devices import IMPORT_PATH
from pliant.bench.budget.shift import CHAT, IMAGES, PLACES, SERVICES, TEXTS, Asked, Split
from pliant.bench.load import LoadError, session
from pliant.bench.ray_session import Running, free_port, running
from pliant.bench.report import Figure, Options, Report, median
from pliant.config.cluster import AUTOSCALING_POLICY
from pliant.deployments.serving.budget_policies import by_name
from pliant.simulation.cluster.simulator import Outcome

_READY_WITHIN_S = 300.0
_ASLEEP = {name: {"min": 0, "max": 1} for name in SERVICES}
_ELASTIC = {name: {"min": 1, "max": 4} for name in SERVICES}


@dataclass(frozen=True)
class _Plan:
    phase_s: float
    warm_s: float
    """Before the first phase, with its load: a planner decides nothing in its first minute."""
    wakes: int
    splits: int = 2
    seed: int = 0


_QUICK = _Plan(phase_s=60, warm_s=100, wakes=1)
_FULL = _Plan(phase_s=100, warm_s=100, wakes=3)
_WARM_FIXED_S = 15.0


@dataclass(frozen=True)
class _Run:
    """What came of one system, and what was foreseen of it."""

    seen: Seen
    foreseen: Outcome

    @property
    def attained(self) -> float:
        return shift.weighted(self.seen.attained())

    def points_off(self) -> float:
        return 100 * abs(self.foreseen.attainment - self.attained)


def run(options: Options) -> Report:
    """Figures and a plot. Raises LoadError if a cluster does not get ready."""
    plan = _QUICK if options.quick else _FULL
    asked = shift.arrivals(plan.phase_s, shift.per_place(), plan.seed)
    fixed = shift.best_splits(asked, 3 * plan.phase_s, plan.splits)
    with (
        tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as folder,
        Progress(transient=True) as progress,
    ):
        task = progress.add_task("budget", total=1 + len(fixed) + plan.wakes)
        made = _models(Path(folder))

        def done(what: str) -> None:
            progress.update(task, advance=1, description=what)

        ours = _ours(plan, asked, made)
        done("one budget")
        others = {}
        for split in fixed:
            others[_name(split)] = _fixed(plan, asked, made, split)
            done(_name(split))
        woken = []
        for _ in range(plan.wakes):
            woken.append(_wake(made))
            done("asleep")
    return _report(plan, ours, others, woken)


def _models(folder: Path) -> dict[str, str]:
    return {
        TEXTS: models.text_model(folder / TEXTS),
        IMAGES: models.image_model(folder / IMAGES),
        CHAT: models.chat_model(folder / CHAT),
    }


def _ours(plan: _Plan, asked: list[Asked], made: Mapping[str, str]) -> _Run:
    with _cluster(made, _ELASTIC, budget={}) as address:
        seen = asyncio.run(_played(address, plan, asked, plan.warm_s))
    starts = {name: found for name in SERVICES if (found := clients.start_s(seen.looks, name)) is not None}
    first = next(look for look in seen.looks if look.at_s >= 0)
    begin = {name: len(each) for name, each in first.answers.items()}
    foreseen = shift.simulated(asked, 3 * plan.phase_s, by_name("joint"), begin, starts)
    return _Run(seen, foreseen)


def _fixed(plan: _Plan, asked: list[Asked], made: Mapping[str, str], split: Split) -> _Run:
    with _cluster(made, split) as address:
        seen = asyncio.run(_played(address, plan, asked, _WARM_FIXED_S))
    return _Run(seen, shift.simulated(asked, 3 * plan.phase_s, shift.Fixed(split), split, {}))


async def _played(address: str, plan: _Plan, asked: list[Asked], warm_s: float) -> Seen:
    """What came of `asked`, after the first phase's load for `warm_s`."""
    before = shift.arrivals(warm_s, shift.per_place(), plan.seed + 1)
    warm = [Asked(each.at_s - warm_s, each.service) for each in before if each.at_s < warm_s]
    seen = await clients.play(address, [*warm, *asked], time.monotonic() + warm_s)
    seen.ends = [end for end in seen.ends if end.at_s >= 0 or end.lost]
    return seen


def _wake(made: Mapping[str, str]) -> dict[str, float]:
    """Seconds until the first answer of each service, which sleep all, one after the other."""

    async def asked(address: str) -> dict[str, float]:
        found = {}
        async with session() as http:
            for name in SERVICES:
                end = await clients.ask(http, address, Asked(0.0, name), 0)
                if end.what != "answered":
                    raise LoadError(f"{name}, asleep, was asked: {end.what}")
                found[name] = end.seconds
        return found

    with _cluster(made, _ASLEEP, budget={}) as address:
        return asyncio.run(asked(address))


@contextmanager
def _cluster(made: Mapping[str, str], replicas: Mapping[str, Any], **changes: Any) -> Iterator[str]:
    """One that is ready, and its address."""
    with tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as name:
        folder, port = Path(name), free_port()
        (folder / "state").mkdir()
        application = {
            "import_path": IMPORT_PATH,
            "autoscaling_policy": {"policy_function": AUTOSCALING_POLICY},
            "logging_config": {"enable_access_log": False},
            "args": shift.args(made, replicas, str(folder / "state"), **changes),
        }
        content = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
        (folder / "cluster.yaml").write_text(yaml.safe_dump(content))
        command = [sys.executable, "-m", "pliant.deployments.run", str(folder / "cluster.yaml")]
        resources = {"RAY_OVERRIDE_RESOURCES": f'{{"GPU": {PLACES}}}'}
        settings = {**ray_settings.ENVIRONMENT, **haproxy.environment(None), **resources}
        with running(command, folder, settings) as started:
            _await_ready(started, address := f"http://127.0.0.1:{port}", replicas)
            yield address


def _await_ready(started: Running, address: str, replicas: Mapping[str, Any]) -> None:
    least = {name: each if isinstance(each, int) else each["min"] for name, each in replicas.items()}
    while started.seconds() < _READY_WITHIN_S and started.process.poll() is None:
        with suppress(httpx.HTTPError, ValueError, KeyError):
            views = httpx.get(f"{address}/stats", timeout=60).json()["services"]
            if all(views[name]["ready"] and len(views[name]["replicas"]) >= least[name] for name in SERVICES):
                return
        time.sleep(0.5)
    raise LoadError(f"the cluster did not get ready:\n{started.tail()}")


def _name(split: Split) -> str:
    return "-".join(str(split[name]) for name in SERVICES)


def _report(plan: _Plan, ours: _Run, others: Mapping[str, _Run], woken: list[dict[str, float]]) -> Report:
    best = max(others, key=lambda name: others[name].attained)
    runs = {"one budget": ours, **others}
    new = {
        name: clients.new_place_s(ours.seen.looks, name, at * plan.phase_s)
        for at, name in enumerate(SERVICES)
        if at  # the first phase's load is there before
    }
    lost = [end for each in runs.values() for end in each.seen.lost()]
    said = f"{ours.attained:.1%}; {best} places {others[best].attained:.1%}"
    figures = [
        median("lost", [len(lost)], "0", f"of {sum(len(each.seen.ends) for each in runs.values()):,}"),
        median("attainment_vs_best_fixed", [ours.attained / others[best].attained], ">= 1.15", said),
        Figure("new_place_s", max(new.values()), min(new.values()), max(new.values()), "<= 15", "the later shift"),
        median("foreseen_points_off", [ours.points_off()], "<= 5", f"foreseen {ours.foreseen.attainment:.1%}"),
        median("foreseen_points_off_fixed", [each.points_off() for each in others.values()], "<= 5"),
        *(median(f"asleep_to_first_answer_s_{name}", [each[name] for each in woken]) for name in SERVICES),
    ]
    config = {
        **asdict(plan),
        "places": PLACES,
        "per_place": {name: round(each, 2) for name, each in shift.per_place().items()},
        "hot": shift.HOT,
        "cold": shift.COLD,
        "weights": dict(shift.WEIGHTS),
        "new_place_s": new,
        "start_s": {name: clients.start_s(ours.seen.looks, name) for name in SERVICES},
        "runs": {name: _facts(each) for name, each in runs.items()},
        "lost": dict(Counter(f"{end.service}: {end.what}" for end in lost)),
        "reasons": clients.reasons(ours.seen.looks),
        "foreseen_reasons": [f"{now:.0f} s: {reason}" for now, reason in ours.foreseen.reasons],
    }
    return Report(figures, config, {"places": _plot(plan, ours.seen)})


def _facts(each: _Run) -> dict[str, Any]:
    ends = Counter(f"{end.service} {end.what}" for end in each.seen.ends if not end.lost)
    return {
        "attained": {name: round(share, 4) for name, share in each.seen.attained().items()},
        "foreseen": {name: round(share, 4) for name, share in shift.shares(each.foreseen).items()},
        "weighted": [round(each.attained, 4), round(each.foreseen.attainment, 4)],
        "ends": dict(ends),
        "lag_s": round(each.seen.lag_s, 3),
    }


def _plot(plan: _Plan, seen: Seen) -> Plot:
    """Places of each service over time."""
    plot, axes = plt.subplots(figsize=(8, 3))
    for name in SERVICES:
        axes.step([each.at_s for each in seen.looks], [len(each.answers[name]) for each in seen.looks], label=name)
    for at in range(4):
        axes.axvline(at * plan.phase_s, color="grey", linewidth=0.5)
    axes.set_xlabel("seconds")
    axes.set_ylabel("places that answer")
    axes.legend()
    return plot
