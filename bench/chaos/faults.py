"""What befalls a process of a cluster, and how that is undone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterable

import psutil

CUT_S = 5.0
"""For which connections are cut."""
_CUT_EVERY_S = 0.05
_PIDFD_GETFD = 438
"""The system call: `os` has no function for it."""

FAULTS: dict[str, Callable[[psutil.Process, Iterable[psutil.Process]], None]] = {
    "SIGKILL": lambda process, _peers: process.kill(),
    "SIGSTOP": lambda process, _peers: process.suspend(),
    "out of memory": lambda process, _peers: _limit(process, psutil.RLIMIT_AS, process.memory_info().vms),
    "full disk": lambda process, _peers: _limit(process, psutil.RLIMIT_FSIZE, 0),
    "cut": lambda process, peers: _cut_again_and_again(process, peers),
}
"""What befalls a process that talks with its peers. Out of memory: it gets no more than it has. Full disk: it can write
no byte to any file. Cut: for some seconds its connections with its peers are closed, whatever is under way there, and
so are those that take their place. (A network that swallows packets would need a firewall.)"""


def undo(process: psutil.Process) -> None:
    """Of all faults."""
    process.resume()
    for what in (psutil.RLIMIT_AS, psutil.RLIMIT_FSIZE):
        _limit(process, what, process.rlimit(what)[1])


def cut(process: psutil.Process, peers: Iterable[psutil.Process]) -> int:
    """Close all TCP connections of `process` with `peers`, of this machine as it is; how many there were."""
    theirs = {
        (each.raddr.port, each.laddr.port) for peer in peers for each in peer.net_connections("tcp") if each.raddr
    }
    mine = [
        each
        for each in process.net_connections("tcp")
        if each.raddr and (each.laddr.port, each.raddr.port) in theirs and each.fd >= 0
    ]
    for each in mine:
        with contextlib.suppress(OSError), _same(process, each.fd) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    return len(mine)


def _cut_again_and_again(process: psutil.Process, peers: Iterable[psutil.Process]) -> None:
    ends = time.monotonic() + CUT_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while time.monotonic() < ends:
            cut(process, peers)
            time.sleep(_CUT_EVERY_S)


def _same(process: psutil.Process, fd: int) -> socket.socket:
    """The socket that is `fd` in `process`, one of ours. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(process.pid)
    try:
        if (mine := libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(pidfd)
    return socket.socket(fileno=mine)


def _limit(process: psutil.Process, what: int, most: int) -> None:
    """The hard limit stays, so that this can be undone."""
    process.rlimit(what, (most, process.rlimit(what)[1]))
