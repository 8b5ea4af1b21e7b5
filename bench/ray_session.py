"""A command with a Ray of its own: `pliant serve` or `serve run`, apart from any other, and nothing left of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PRCTL = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1
_DRAINS_WITHIN_S = 120
_DIES_WITHIN_S = 30
_TAIL = 4000
"""Characters of a log that an error shows."""


@dataclass(frozen=True)
class Running:
    """A command that was started, and the folder that holds its log and its Ray's files."""

    process: subprocess.Popen[bytes]
    folder: Path
    since: float
    """time.monotonic() just before it was started."""

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.folder / "log"

    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.since

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-_TAIL:]

    def family(self) -> list[psutil.Process]:
        """The process and all that it started and that still run."""
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def script(name: str) -> str:
    """The path of a command that is installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


def environment(folder: Path) -> dict[str, str]:
    """For a Ray session that keeps its files in `folder`, apart from any other on this machine.

    The folder's path must be short, because Ray puts Unix sockets below it.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**kept, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, settings: Mapping[str, str]) -> Iterator[Running]:
    """Start `command` in `folder`, with its output in `folder`/log; end it, and all that it started, afterwards.

    If the thread that enters this ends without leaving it, as with a process that is killed, the command gets SIGTERM.
    """
    with (folder / "log").open("w") as log:
        since = time.monotonic()
        process = subprocess.Popen(
            command,
            env={**environment(folder), **settings},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_stop_with_parent,
        )
    started = Running(process, folder, since)
    try:
        yield started
    finally:
        _end(started)


def _stop_with_parent() -> None:
    """In a child, before it runs its command."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(started: Running) -> None:
    """Ask it to stop, which `pliant serve` and `serve run` do once Serve has, and kill what is left then."""
    family = started.family()
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.process.wait(_DRAINS_WITHIN_S)
    left = {process.pid: process for process in (*family, *_named(started.folder)) if process.is_running()}
    for process in left.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left.values(), timeout=_DIES_WITHIN_S)
    started.process.wait()


def _named(folder: Path) -> Iterator[psutil.Process]:
    """Processes whose command line names `folder`: Ray's own, even if whoever started them has gone."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in argument for argument in process.info["cmdline"] or ()):
            yield process
