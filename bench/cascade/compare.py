"""Tabi, repeated and measured: a cascade against the best single model and against a vote of small ones (Tabi §7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress

from pliant.bench.cascade import exit_levels, figures, levels, live, plots
from pliant.bench.cascade.levels import Prepared
from pliant.bench.cascade.rows import rows
from pliant.bench.cascade.study import LOSSES, Scale, Studied, study
from pliant.bench.findings import Findings
from pliant.bench.report import Options, Report, paper_and_here
from pliant.errors import DataError

_log = logging.getLogger("pliant")

_QUICK = Scale(texts=400, timed=100, passes=3, seeds=3, resplits=5), live.Scale(profiled=800, texts=60, repetitions=2)
_FULL = (
    Scale(texts=5000, timed=1000, passes=7, seeds=20, resplits=100),
    live.Scale(profiled=3000, texts=300, repetitions=5),
)


def run(options: Options) -> Report:
    """All of it, into one report; the table "paper / here" is printed. The last task is also served live.

    If `options.cells` names tasks, others are left out. So are data sets without `options.data`, and in a quick run
    those whose models must be fine-tuned first. Raises DataError if there is no task of a name, or none is left.
    """
    scale, live_scale = _QUICK if options.quick else _FULL
    found = Findings()
    config: dict[str, object] = {
        **asdict(scale),
        "live": asdict(live_scale),
        "losses": LOSSES,
        "exit_losses": exit_levels.LOSSES,
    }
    last: tuple[Prepared, Studied] | None = None
    with Progress(transient=True) as progress:
        task = progress.add_task("models", total=None)

        def tell(text: str) -> None:
            progress.update(task, description=text)

        for prepared in _prepared(options, tell):
            studied = study(prepared, scale, tell)
            found.add(Findings(figures.figures(studied), rows(studied), plots.evaluation(studied)))
            found.figures += exit_levels.figures(prepared, scale, tell)
            config[prepared.name] = figures.config(studied)
            last = prepared, studied
        if last is None:
            raise DataError(
                "no task is left to measure: give the folder of data sets with --data, and run once without --quick"
            )
        served = live.run(*last, live_scale, tell)
    found.figures += live.figures(served, last[0].name)
    found.plots[f"live-{last[0].name}"] = plots.arrivals(served, last[0].name)
    Console().print(paper_and_here("Tabi's evaluation, repeated", found.rows))
    return Report(found.figures, {**config, "paper_and_here": [row._asdict() for row in found.rows]}, found.plots)


def _prepared(options: Options, tell: Callable[[str], None]) -> Iterator[Prepared]:
    """Each task, with its models trained."""
    known = [levels.ZOO_TASK, *(task.name for task in levels.FINE_TUNED)]
    wanted = options.chosen(known, "tasks")
    if levels.ZOO_TASK in wanted:
        yield levels.zoo()
    for task in levels.FINE_TUNED if options.data else ():
        assert options.data is not None
        if task.name not in wanted:
            continue
        splits = task.read(options.data)
        if options.quick and not task.trained(splits):
            _log.warning("%s is left out: its models learn for minutes; run once without --quick", task.name)
            continue
        yield levels.fine_tuned(task, splits, lambda what, done: tell(f"{what}: {done:.0%}"))
