"""A node of Ray starts however slow its machine is.

Ray ends a node whose agents, Python programs that take seconds of a processor to start, have not told it within 15
seconds at which ports they listen, and whoever starts it gives up after 30. On a busy core neither is enough.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ray._private import services
from ray._raylet import persist_port  # type: ignore[attr-defined]  # compiled

_IN_A_FILE = "dashboard_agent_listen_port"
_PORTS = ("metrics_agent_port", "metrics_export_port", _IN_A_FILE, "runtime_env_agent_port")
"""Of a node's agents, as `services.start_raylet` calls them."""
_ABOVE_OTHERS = range(61_000, 65_536)
"""Ports that Linux gives to no connection: what is free stays so until an agent takes it."""
_ASKED = 30
"""Times, for half a minute each."""
_given: list[socket.socket] = []
"""What marks ports."""


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Whatever node this process starts meanwhile may take its time."""
    start, ask = services.start_raylet, services.get_node
    services.start_raylet = partial(_start, start)
    services.get_node = partial(_wait, ask)
    try:
        yield
    finally:
        services.start_raylet, services.get_node = start, ask


def _start(start: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """With ports that are known before any agent starts; the one that Ray does not pass on is in the file it reads."""
    given = inspect.signature(start).bind(*args, **options).arguments
    ports = {name: given.get(name) or port for name, port in zip(_PORTS, _free(len(_PORTS)), strict=True)}
    persist_port(given["session_dir"], given["node_id"], _IN_A_FILE, ports[_IN_A_FILE])
    return start(*args, **options | ports)


def _wait(ask: Callable[[str, str], Any], address: str, node: str) -> Any:
    for _ in range(_ASKED):
        with contextlib.suppress(RuntimeError):
            return ask(address, node)
        time.sleep(0.5)
    return ask(address, node)


def _free(count: int) -> list[int]:
    """Different ports that nothing listens on, and that no node was given whose agents may still be about to.

    As long as this process lives, an abstract socket, which one process of this machine can have, marks them as given.
    """
    blocks = range(_ABOVE_OTHERS.start, _ABOVE_OTHERS.stop - count, count)
    for first in random.sample(blocks, len(blocks)):
        mark = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            mark.bind(f"\0pliant gave ports from {first}")
            ports = [*range(first, first + count)]
            for port in ports:
                with socket.socket() as probe:
                    probe.bind(("", port))
            _given.append(mark)
            return ports
        mark.close()
    raise OSError(f"no {count} ports in a row from {_ABOVE_OTHERS[0]} to {_ABOVE_OTHERS[-1]} are free")
