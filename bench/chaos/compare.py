"""What clients notice when a part of a cluster of three nodes dies, stops, ends, loses its connections, or gets no
memory, no disk or a slow one, under a load of all kinds. `--cells "planner:full disk" node:SIGKILL` tries only these.

Clients of short texts and of images ask once; a stream that breaks off goes on behind its last event, and a load that
was answered with 503 is asked for again. What gets no answer then is lost; what takes more than five seconds is late.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pliant import haproxy, ray_settings
from pliant.bench.chaos import slow_disk
from pliant.bench.chaos.plan import FULL, IMPOSSIBLE, QUICK, SLOW, Cell
from pliant.bench.load import LoadError
from pliant.bench.ray_session import running
from pliant.bench.report import Figure, Options, Report

_ENDS_WITHIN_S = 7200


def run(options: Options) -> Report:
    """Raises LoadError if a cluster breaks before its first cell is over, or there is no such cell."""
    plan = QUICK if options.quick else FULL
    if options.cells:
        plan = [cell for cell in FULL if cell.name in options.cells]
        if unknown := set(options.cells) - {cell.name for cell in plan}:
            there = ", ".join(cell.name for cell in FULL)
            raise LoadError(f"no such cells: {', '.join(sorted(unknown))}; there are {there}")
    ordinary, slow = ([cell for cell in plan if (cell == SLOW) is on_it] for on_it in (False, True))
    cells = [*_cells(ordinary), *_cells(slow)]
    possible = [cell for cell in cells if "impossible" not in cell]
    named = [cell for cell in cells if "impossible" in cell]
    stopped = [cell["recover_s"] for cell in possible if cell["fault"] == "SIGSTOP"]
    others = [cell["recover_s"] for cell in possible if cell["fault"] != "SIGSTOP"]
    figures = [
        _sum("lost", possible, "0"),
        _sum("wrong", possible, "0"),
        _sum("late", possible, ""),
        _sum("lost", named, "", "_impossible"),
        *_p95("recover_s_p95", others, "<= 5"),
        *_p95("recover_s_p95_stopped", stopped, "<= 10"),
    ]
    return Report(figures, {"sent": sum(cell["sent"] for cell in cells), "cells": cells}, {})


def _cells(plan: list[Cell]) -> list[dict[str, Any]]:
    """What was found in each; a cluster that one of them broke for good is followed by another one."""
    found: list[dict[str, Any]] = []
    while rest := plan[len(found) :]:
        found += _of_one_cluster(rest)
    for cell, seen in zip(plan, found, strict=True):
        if cell in IMPOSSIBLE:
            seen["impossible"] = IMPOSSIBLE[cell]
    return found


def _of_one_cluster(plan: list[Cell]) -> list[dict[str, Any]]:
    """What was found in the first cells of `plan`: until the last, or one that the cluster did not outlive. Raises
    LoadError if that is none."""
    settings = {**ray_settings.ENVIRONMENT, **haproxy.environment(None), "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        given, out = folder / "plan.json", folder / "out.json"
        given.write_text(json.dumps(plan))
        slow_disk.plugin(folder)
        command = [sys.executable, "-m", "pliant.bench.chaos.cells", str(given), str(out)]
        path = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        variables = {**settings, "PYTHONPATH": path, slow_disk.SWITCH: str(folder / "slow")}
        with running(command, folder, variables) as started:
            try:
                started.process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise LoadError(f"it has not ended:\n{started.tail()}") from None
            if not out.exists():
                raise LoadError(started.tail())
            found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def _sum(what: str, cells: list[dict[str, Any]], target: str, suffix: str = "") -> Figure:
    values = [cell[what] for cell in cells]
    return Figure(f"{what}{suffix}", sum(values), min(values, default=0), max(values, default=0), target)


def _p95(name: str, values: list[float], target: str) -> list[Figure]:
    """None, if there are no such cells."""
    if not values:
        return []
    p95 = float(np.percentile(values, 95))
    return [Figure(name, p95, min(values), max(values), target, f"of {len(values)} cells")]
