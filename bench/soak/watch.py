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
_OTHERS = ("other", "idle workers", "compilers")
"""They come and go."""


class Sample(NamedTuple):
    """At one time; by what a process is for."""

    at_s: float
    pss_mb: Mapping[str, float]
    descriptors: Mapping[str, float]
    threads: Mapping[str, float]
    series: Mapping[str, float]
    """Label sets of the gateway's page, and of Ray's."""


def look(started: Running, address: str) -> Sample:
    """At the processes of the cluster, and its pages for Prometheus."""
    found: dict[str, defaultdict[str, float]] = {
        each: defaultdict(float) for each in ("pss_mb", "descriptors", "threads")
    }
    for process in started.family():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            name = kind(command(process))
            if name in _OTHERS:
                continue
            values = process.memory_full_info().pss / 2**20, process.num_fds(), process.num_threads()
            for each, value in zip(found.values(), values, strict=True):
                each[name] += value
                each[WHOLE] += value
                each[OURS] += value * name.startswith(OF_OURS)
    ports = started.folder.glob("ray/session_latest/metrics_export_port_*")
    pages = {"gateway": f"{address}/metrics", "ray": f"http://127.0.0.1:{next(ports).read_text()}/metrics"}
    series = {name: float(_series(httpx.get(url, timeout=60).text)) for name, url in pages.items()}
    return Sample(started.seconds(), **found, series=series)


def growth(samples: Sequence[Sample], values: Iterable[Mapping[str, float]], name: str) -> float:
    """By how much an hour `name` would grow, as the line through `values`, one of each of `samples`, says."""
    at_s = np.array([sample.at_s for sample in samples])
    slope, _ = np.polyfit(at_s, [each.get(name, 0.0) for each in values], 1)
    return float(slope * 3600)


def _series(page: str) -> int:
    """Of a page for Prometheus; of what pliant counts, as Ray's own depend on the machine."""
    return sum(line.startswith(("pliant_", "ray_pliant_")) for line in page.splitlines())
