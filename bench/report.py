"""What a benchmark found: figures with their spread, a table for people, JSON for machines."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure as Plot
from rich.console import Console
from rich.table import Table

from pliant.errors import DataError

_PACKAGES = ("torch", "ray", "transformers", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Options:
    """What the command line asked for. `data` is a folder of public data sets; `device` is "cpu" or "cuda"; `cells` are
    what the bench is to try, if not all; `gpu` is a folder of what `python -m bench gpu` measured, for simulations of
    that GPU beside the paper's."""

    quick: bool
    data: Path | None
    device: str
    out: Path
    cells: list[str] | None = None
    gpu: Path | None = None

    def chosen(self, known: Sequence[str], called: str) -> Sequence[str]:
        """The cells that are asked for, of those `known`, or all. Raises DataError for one that there is not."""
        if unknown := {*(self.cells or ())} - {*known}:
            raise DataError(f"--cells: got {', '.join(sorted(unknown))}; {called} are {', '.join(known)}")
        return self.cells or known


@dataclass(frozen=True)
class Figure:
    """One number that was measured, and the least and greatest of the blocks that it is the median of."""

    name: str
    value: float
    low: float
    high: float
    target: str = ""
    beside: str = ""
    """What the number was made of, for people."""


class Row(NamedTuple):
    """A number of the paper, and the same here."""

    what: str
    paper: str
    here: str


@dataclass(frozen=True)
class Report:
    """The figures of one run, what was run, and the plots by name."""

    figures: Sequence[Figure]
    config: dict[str, Any]
    plots: dict[str, Plot]


def paper_and_here(title: str, rows: Iterable[Row]) -> Table:
    """The table "paper / here"."""
    table = Table("", "paper", "here", title=title)
    for row in rows:
        table.add_row(*row)
    return table


def median(name: str, values: Sequence[float], target: str = "", beside: str = "") -> Figure:
    """The figure of `values`, one for each block."""
    return Figure(name, statistics.median(values), min(values), max(values), target, beside)


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float], target: str = "", beside: str = "") -> Figure:
    """The figure ours / theirs: the median over pairs of blocks that ran side by side."""
    return median(name, [mine / other for mine, other in zip(ours, theirs, strict=True)], target, beside)


def write(name: str, report: Report, machine: dict[str, Any], out: Path) -> None:
    """Print the table, and write NAME.json and the plots to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "figures": {figure.name: figure.value for figure in report.figures},
        "spread": {figure.name: [figure.low, figure.high] for figure in report.figures},
        "config": report.config,
        "machine": machine,
    }
    (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    for title, plot in report.plots.items():
        plot.savefig(out / f"{name}-{title}.png", dpi=120, bbox_inches="tight")
        plt.close(plot)
    console = Console()
    console.print(_table(name, report.figures))
    load = ", ".join(f"{value:.1f}" for value in (*machine["load_before"], *machine["load_after"]))
    console.print(f"{machine['cpu']}, {machine['cores']} cores; load average before and after: {load}", highlight=False)
    console.print(f"Written to {out}.", highlight=False)


def machine() -> dict[str, Any]:
    """The machine and the versions that figures depend on; `load_before` is the load average now (1, 5, 15 minutes)."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in _PACKAGES}},
        "load_before": load_average(),
    }


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _table(name: str, figures: Sequence[Figure]) -> Table:
    table = Table(title=name)
    table.add_column("figure", no_wrap=True)
    for column in ("median", "blocks", "target", "beside"):
        table.add_column(column)
    for figure in figures:
        spread = f"{_number(figure.low)} to {_number(figure.high)}"
        table.add_row(figure.name, _number(figure.value), spread, figure.target, figure.beside)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
