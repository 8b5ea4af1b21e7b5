"""What the processes of a cluster are for, told from their command lines, and the memory that each kind takes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import psutil

COMPILERS = "compilers"
_KINDS = (
    (r"^ray::(?:\S+:)?ServeReplica:[^:]+:(gateway|planner)(?![\w-])", r"\1"),
    (r"^ray::(?:\S+:)?ServeReplica:[^:]+:([\w-]+)", r"replicas of \1"),
    (r"^ray::(ServeController|ProxyActor)", "Serve controller and proxy"),
    (r"^ray::IDLE", "idle workers"),
    (r"^ray::(DashboardAgent|RuntimeEnvAgent)|^ray-|/site-packages/ray/", "Ray daemons"),
    (r"multiprocessing\.(forkserver|resource_tracker)", "Ray daemons"),
    (r"-m pliant\.deployments\.run |/pliant serve |/serve run ", "command"),
    (r"-m pliant\.|(^|/)(cc1plus|cc1|gcc|g\+\+|cc|c\+\+|clang[\w+-]*|collect2|as|ld) ", COMPILERS),
)
"""Patterns of command lines, and what they are; the first that matches counts."""


def kind(command: str) -> str:
    """What the process with this command line is for."""
    for pattern, name in _KINDS:
        if match := re.search(pattern, command):
            return match.expand(name)
    return "other"


def memory(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Gigabytes (10^9 bytes) of proportional set size by kind: a page that n processes share counts 1/n in each."""
    found: dict[str, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            name, pss = kind(command(process)), process.memory_full_info().pss
            found[name] = found.get(name, 0.0) + pss / 1e9
    return found


def processor_seconds(processes: Iterable[psutil.Process]) -> float:
    """That they have used, and those of their children that have ended: less noisy than time on a busy machine."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            total += used.user + used.system + used.children_user + used.children_system
    return total


def background_seconds(processes: Iterable[psutil.Process]) -> float:
    """Processor seconds of those of them that compile or train."""
    return processor_seconds(process for process in processes if compiling([process]))


def compiling(processes: Iterable[psutil.Process]) -> bool:
    """Whether any of them compiles or trains."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if kind(command(process)) == COMPILERS:
                return True
    return False


def command(process: psutil.Process) -> str:
    """Its command line, or the title that it gave itself."""
    return " ".join(process.cmdline()).strip()
