"""ONNX Runtime behind litserve, which batches what arrives together, on the same machine and for the same clients.

How many texts a batch may have, and how long it waits for them, is for its user to choose: there is a server for each
of some choices, and the fastest counts. A server's processes look for work all the time, also when there is none: those
that are not asked are stopped, so that they take nothing from the one that is, nor from ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from pliant.bench.load import LoadError
from pliant.bench.ray_session import free_port

_CHOICES = ((8, 0.002), (16, 0.005), (32, 0.01))
"""Texts, and seconds to wait for them."""
_STARTS_WITHIN_S = 120
_LOOK_S = 0.2


class Server:
    """One that has started, and stands still but while it is `awake`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self._group = process.pid
        """It leads a session."""
        os.killpg(self._group, signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        os.killpg(self._group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._group, signal.SIGSTOP)


@contextmanager
def servers(model: str, onnx: Path, workers: int) -> Iterator[dict[str, Server]]:
    """By name: servers, each of so many workers of one thread. Raises LoadError if one does not start."""
    with ExitStack() as running:
        found: dict[str, Server] = {}
        for batch, wait_s in _CHOICES:
            port = free_port()
            options = {"model": model, "onnx": onnx, "port": port, "workers": workers, "batch": batch, "wait": wait_s}
            command = [sys.executable, "-m", "pliant.bench.encoder.litserve_server"]
            command += [f"--{key}={value}" for key, value in options.items()]
            server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            running.callback(_end, server)
            address = f"http://127.0.0.1:{port}"
            _wait_until_started(address)
            found[f"litserve, {batch} texts within {wait_s * 1e3:g} ms"] = Server(f"{address}/predict", server)
        yield found


def _wait_until_started(address: str) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(_LOOK_S)
    raise LoadError(f"litserve did not start within {_STARTS_WITHIN_S} s at {address}")


def _end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin
    server.stdin.close()
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGCONT)
    server.wait()
