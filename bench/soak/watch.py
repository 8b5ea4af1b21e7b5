"""What each process of a cluster has, over time, and by how much that grows."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import httpx
import numpy as np
import psutil

from pliant.bench.ray_session import Running
from pliant.bench.start.processes import command, kind

WHOLE = "all"
OURS = "ours"
"""Without Ray's own processes."""
OF_OURS = ("gateway", "planner", "replicas of")
_STRETCHES = 10
_T = 2.306
"""Student's, of 8 degrees of freedom: 95% lie within."""
_OTHERS = ("other", "idle workers", "compilers")
"""They come and go."""


class Sample(NamedTuple):
    """At one time; by what a process is for."""

    at_s: float
    private_mb: Mapping[str, float]
    """What no other process has, too: a share of what several have would grow when one of them ends."""
    descriptors: Mapping[str, float]
    threads: Mapping[str, float]
    series: Mapping[str, float]
    """Label sets of the gateway's page, and of Ray's."""


def look(started: Running, address: str) -> Sample:
    """At the processes of the cluster, and its pages for Prometheus."""
    found: dict[str, defaultdict[str, float]] = {
        each: defaultdict(float) for each in ("private_mb", "descriptors", "threads")
    }
    for process in started.family():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            name = kind(command(process))
            if name in _OTHERS:
                continue
            values = process.memory_full_info().uss / 2**20, process.num_fds(), process.num_threads()
            for each, value in zip(found.values(), values, strict=True):
                each[name] += value
                each[WHOLE] += value
                each[OURS] += value * name.startswith(OF_OURS)
    ports = started.folder.glob("ray/session_latest/metrics_export_port_*")
    pages = {"gateway": f"{address}/metrics", "ray": f"http://127.0.0.1:{next(ports).read_text()}/metrics"}
    series = {name: float(_series(httpx.get(url, timeout=60).text)) for name, url in pages.items()}
    return Sample(started.seconds(), **found, series=series)


class Growth(NamedTuple):
    """An hour, and between which bounds it is, with 95% confidence."""

    an_hour: float
    least: float
    most: float


def warmed_up(values: Sequence[float]) -> int:
    """Where the warm-up ends: the place within the first half from which on the mean has the least standard error (the
    MSER rule: White, "An effective truncation heuristic for bias reduction in simulation output", 1997)."""
    after = [np.array(values[place:]) for place in range(len(values) // 2 + 1)]
    return min(range(len(after)), key=lambda place: after[place].var() / len(after[place]))


def growth(samples: Sequence[Sample], values: Iterable[Mapping[str, float]], name: str) -> Growth:
    """By how much `name` would grow, as the line through `values` says, one of each of `samples`.

    The line goes through the means of ten stretches, which depend less on each other than samples that follow each
    other. Raises ValueError if there are fewer samples.
    """
    if len(samples) < _STRETCHES:
        raise ValueError(f"a line needs {_STRETCHES} samples, got {len(samples)}; look more often")
    hours = np.array([np.mean(part) for part in np.array_split([each.at_s / 3600 for each in samples], _STRETCHES)])
    means = np.array([np.mean(part) for part in np.array_split([each.get(name, 0.0) for each in values], _STRETCHES)])
    around = hours - hours.mean()
    slope = float(around @ means / (around @ around))
    rest = means - means.mean() - slope * around
    unsure = _T * float(np.sqrt(rest @ rest / (_STRETCHES - 2) / (around @ around)))
    return Growth(slope, slope - unsure, slope + unsure)


def _series(page: str) -> int:
    """Of a page for Prometheus; of what pliant counts, as Ray's own depend on the machine."""
    return sum(line.startswith(("pliant_", "ray_pliant_")) for line in page.splitlines())
