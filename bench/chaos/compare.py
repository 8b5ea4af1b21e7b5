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

from pliant import haproxy, ray_settings
from pliant.bench.chaos import slow_disk
from pliant.bench.load import LoadError
from pliant.bench.ray_session import running
from pliant.bench.report import Figure, Options, Report

_QUICK = [
    *(("gateway", "SIGKILL"), ("planner", "SIGKILL"), ("planner", "SIGSTOP"), ("controller", "SIGKILL")),
    *(("replica of topics-small", "SIGKILL"), ("replica of chat", "SIGKILL"), ("replica of digits", "SIGKILL")),
    *(("replica of topics-small", "SIGSTOP"), ("replica of chat", "SIGSTOP")),
]
_FULL = [
    *_QUICK,
    *(("gateway", "SIGSTOP"), ("controller", "SIGSTOP"), ("replica of digits", "SIGSTOP")),
    *(("edge", "SIGKILL"), ("edge", "SIGSTOP"), ("node", "SIGKILL"), ("node", "SIGTERM")),
    *(("gateway", "out of memory"), ("planner", "out of memory"), ("replica of topics-small", "out of memory")),
    *(("replica of chat", "out of memory"), ("replica of digits", "out of memory")),
    *(("controller", "out of memory"), ("edge", "out of memory"), ("controller", "full disk"), ("edge", "full disk")),
    *(("gateway", "full disk"), ("planner", "full disk"), ("replica of topics-small", "full disk")),
    *(("replica of chat", "full disk"), ("replica of digits", "full disk"), ("controller", "cut")),
    *(("planner", "cut"), ("replica of topics-small", "cut"), ("replica of chat", "cut"), ("replica of digits", "cut")),
    ("state", "slow disk"),
]
_SLOW = ("state", "slow disk")
"""In a cluster of its own, as all others have state in a folder."""
_ENDS_WITHIN_S = 3600


def run(options: Options) -> Report:
    """Raises LoadError if the cluster breaks in a way that is not meant, or there is no such cell."""
    plan = _QUICK if options.quick else _FULL
    if options.cells:
        plan = [cell for cell in _FULL if ":".join(cell) in options.cells]
        if unknown := set(options.cells) - {":".join(cell) for cell in plan}:
            raise LoadError(f"no such cells: {', '.join(sorted(unknown))}; there are {', '.join(map(':'.join, _FULL))}")
    cells = [cell for slow in (False, True) for cell in _cells([each for each in plan if (each == _SLOW) == slow])]
    figures = [
        _sum("lost", [cell["lost"] for cell in cells], "0"),
        _sum("wrong", [cell["wrong"] for cell in cells], "0"),
        _sum("late", [cell["late"] for cell in cells], ""),
        *_longest("recover_s_killed", [cell["recover_s"] for cell in cells if cell["fault"] == "SIGKILL"], "<= 5"),
        *_longest("recover_s_others", [cell["recover_s"] for cell in cells if cell["fault"] != "SIGKILL"], "<= 10"),
    ]
    return Report(figures, {"sent": sum(cell["sent"] for cell in cells), "cells": cells}, {})


def _cells(plan: list[tuple[str, str]]) -> list[dict[str, Any]]:
    if not plan:
        return []
    settings = {**ray_settings.ENVIRONMENT, **haproxy.environment(None), "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        slow_disk.plugin(folder)
        command = [
            sys.executable,
            "-m",
            "pliant.bench.chaos.cells",
            str(folder / "plan.json"),
            str(folder / "out.json"),
        ]
        path = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        given = {**settings, "PYTHONPATH": path, slow_disk.SWITCH: str(folder / "slow")}
        with running(command, folder, given) as started:
            try:
                code = started.process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise LoadError(f"it has not ended:\n{started.tail()}") from None
            if code:
                raise LoadError(started.tail())
            found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return found


def _sum(name: str, values: list[int], target: str) -> Figure:
    return Figure(name, sum(values), min(values), max(values), target)


def _longest(name: str, values: list[float], target: str) -> list[Figure]:
    """None, if there are no such cells."""
    return [Figure(name, max(values), min(values), max(values), target, "the longest of all cells")] if values else []
