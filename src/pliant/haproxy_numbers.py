"""What HAProxy counts, also of processes that newer ones have replaced: each begins at 0, and a gateway that comes or
goes may replace it."""

from __future__ import annotations

import csv
import io
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_WITHIN_S = 1.0
_MOST_BYTES = 2**20
_MOST_REPLACED = 100
_FRONTEND, _BACKEND, _SERVER = "0", "1", "2"
CLASSES = ("4xx", "5xx")
"""Of statuses, that are counted."""


@dataclass(frozen=True)
class Numbers:
    """Of one HAProxy, or of several, one after another."""

    answered: Mapping[str, int] = field(default_factory=dict)
    """Requests that were answered, by the class of the status."""
    by_gateways: Mapping[str, int] = field(default_factory=dict)
    """Those that a gateway answered. What Serve's own proxy answers, while there is no gateway, is none of these."""
    retried: int = 0
    """Times that another gateway was asked."""

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(
            Counter(self.answered) + Counter(other.answered),
            Counter(self.by_gateways) + Counter(other.by_gateways),
            self.retried + other.retried,
        )


@dataclass(frozen=True)
class Look:
    """What was seen at one time."""

    numbers: Numbers
    """Since the first HAProxy whose numbers were kept."""
    running: int
    """Connections of clients: answers that are under way count as gateways' before they count as answered."""


def look(commands: Path) -> Look:
    """At the HAProxy that takes commands at this socket. Raises OSError or ValueError if it cannot be understood."""
    process = _ask(commands)
    kept, replaced = _kept(commands)
    live = Numbers() if process.pid in replaced else process.numbers
    return Look(kept + live, process.running)


def keep(commands: Path) -> None:
    """Keep the numbers of the HAProxy that takes commands at this socket, as another is about to replace it."""
    with suppress(OSError, ValueError):  # there is none
        process = _ask(commands)
        kept, replaced = _kept(commands)
        if process.pid not in replaced:
            total = kept + process.numbers
            content = [dict(total.answered), dict(total.by_gateways), total.retried]
            draft = _file(commands).with_suffix(".draft")
            draft.write_text(json.dumps([content, [*replaced, process.pid][-_MOST_REPLACED:]]))
            draft.replace(_file(commands))


@dataclass(frozen=True)
class _Process:
    pid: int
    numbers: Numbers
    running: int


def _file(commands: Path) -> Path:
    return commands.with_name("numbers.json")


def _kept(commands: Path) -> tuple[Numbers, list[int]]:
    """The sum over the processes that were replaced, and which these are."""
    try:
        content, replaced = json.loads(_file(commands).read_text())
        return Numbers(*content), replaced
    except (OSError, ValueError, TypeError):
        return Numbers(), []


def _ask(commands: Path) -> _Process:
    info, _, stat = _said(commands, "show info; show stat").partition("# pxname")
    pid = next((line for line in info.splitlines() if line.startswith("Pid: ")), None)
    if pid is None or not stat:
        raise ValueError(f"HAProxy says no numbers, but {info[:100]!r}")
    rows = list(csv.DictReader(io.StringIO("pxname" + stat)))
    try:
        fronts = [row for row in rows if row["type"] == _FRONTEND]
        gateways = [row for row in rows if row["type"] == _SERVER and row["bck"] == "0"]
        numbers = Numbers(
            dict(_by_class(fronts)),
            dict(_by_class(gateways)),
            sum(int(row["wredis"] or 0) for row in rows if row["type"] == _BACKEND),
        )
        return _Process(int(pid.removeprefix("Pid: ")), numbers, sum(int(row["scur"] or 0) for row in fronts))
    except (KeyError, TypeError) as error:
        raise ValueError(f"HAProxy's numbers lack {error}") from None


def _by_class(rows: list[dict[str, str]]) -> Iterator[tuple[str, int]]:
    for each in CLASSES:
        yield each, sum(int(row[f"hrsp_{each}"] or 0) for row in rows)


def _said(commands: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_WITHIN_S)
        connection.connect(str(commands))
        connection.sendall(f"{command}\n".encode())
        said = b""
        while part := connection.recv(65_536):
            said += part
            if len(said) > _MOST_BYTES:
                raise ValueError(f"HAProxy says more than {_MOST_BYTES} bytes")
        return said.decode()
