"""Faults that a test orders of a service, and that one of its replicas then has, in the middle of what it computes.

An order is a file that is named as the service. The first replica that has something to do takes it, by a new name, and
has the fault for as long as the file is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, get_args

import psutil
from support.waiting import wait_until

FOLDER = "PLIANT_TEST_FAULTS"
"""Names the environment variable that names the folder."""
GATEWAY = "ServeReplica:pliant:gateway"
_LOOKS_EVERY_S = 0.01

P = ParamSpec("P")
T = TypeVar("T")
Fault = Literal["killed", "stopped", "raises", "refuses", "slow", "cut"]
"""SIGKILL; SIGSTOP; all that it computes raises; it refuses whatever comes; nothing it computes ends; its connections
with the gateway are cut whenever it computes."""
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class Orders:
    """A replica's view."""

    service: str

    def fault(self) -> str:
        """What this replica has now; "" if nothing."""
        folder, service = Path(os.environ[FOLDER]), self.service
        mine = folder / f"{service}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            return mine.read_text()
        with contextlib.suppress(FileNotFoundError):
            return (folder / service).rename(mine).read_text()
        return ""

    def compute(self) -> None:
        """What is computed now goes wrong, if it is to."""
        fault = self.fault()
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "raises":
            raise RuntimeError("it was ordered to raise")
        elif fault == "cut":
            _cut()
        while fault == "slow" == self.fault():
            time.sleep(_LOOKS_EVERY_S)

    def first(self, computes: Callable[P, T]) -> Callable[P, T]:
        """As `computes`, but see `compute`."""

        @functools.wraps(computes)
        def obeying(*args: P.args, **kwargs: P.kwargs) -> T:
            self.compute()
            return computes(*args, **kwargs)

        return obeying


@contextlib.contextmanager
def ordered(fault: Fault, service: str) -> Iterator[int]:
    """Within, one replica of `service` has `fault`; its process's id. It works on something when that begins."""
    folder = Path(os.environ[FOLDER])
    written = folder / f".{service}"
    written.write_text(fault)
    written.rename(folder / service)
    [taken] = wait_until(lambda: list(folder.glob(f"{service}.*")))
    replica = int(taken.suffix[1:])
    try:
        yield replica
    finally:
        taken.unlink()
        with contextlib.suppress(ProcessLookupError):
            os.kill(replica, signal.SIGCONT)


def _cut() -> None:
    """Close this process's connections with gateways, whatever is under way there."""
    gateways = [each for each in psutil.process_iter(["cmdline"]) if GATEWAY in " ".join(each.info["cmdline"] or ())]
    theirs = {
        (each.raddr.port, each.laddr.port)
        for gateway in gateways
        for each in gateway.net_connections("tcp")
        if each.raddr
    }
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and (each.laddr.port, each.raddr.port) in theirs:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
