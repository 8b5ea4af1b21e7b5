"""Which part is broken in which way, and what of that nobody could hold against pliant."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """Two of its parts are no process of Serve's: "node", and "state", which is the store that state lies on."""

    part: str
    fault: str

    @property
    def name(self) -> str:
        """As `--cells` takes it."""
        return f"{self.part}:{self.fault}"


_REPLICAS = ("replica of topics-small", "replica of chat", "replica of digits")
_SERVING = ("edge", "gateway", "planner", "controller", *_REPLICAS)
SLOW = Cell("state", "slow disk")
"""In a cluster of its own, as all others have state in a folder."""
QUICK = [
    *(Cell("gateway", "SIGKILL"), Cell("planner", "SIGKILL"), Cell("planner", "SIGSTOP")),
    *(Cell("controller", "SIGKILL"), *(Cell(part, "SIGKILL") for part in _REPLICAS)),
    *(Cell("replica of topics-small", "SIGSTOP"), Cell("replica of chat", "SIGSTOP")),
]
_MORE = [
    *(Cell(part, fault) for fault in ("SIGKILL", "SIGSTOP", "out of memory", "full disk") for part in _SERVING),
    *(Cell(part, "cut") for part in ("planner", "controller", *_REPLICAS)),
    *(Cell("node", "SIGKILL"), Cell("node", "SIGTERM"), SLOW),
]
FULL = [*QUICK, *(cell for cell in _MORE if cell not in QUICK)]
IMPOSSIBLE = {
    Cell("edge", "SIGKILL"): "a machine has one HAProxy: its connections end with it, and Ray starts the next one",
    Cell("edge", "SIGSTOP"): "a machine has one HAProxy, and Ray finds out after three seconds that it is silent",
    Cell("edge", "out of memory"): "a machine has one HAProxy, which answers 500 where it gets no memory for a request",
    Cell("controller", "out of memory"): "it hears no answer of a healthy HAProxy, and Serve has it replaced",
    Cell("planner", "full disk"): "what is acknowledged is durable, so nothing is loaded while nothing can be written",
}
"""Cells in which requests are lost whatever pliant does, and why."""
