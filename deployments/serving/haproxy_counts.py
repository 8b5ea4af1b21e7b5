"""What HAProxy answers itself, since no gateway does, and whom it asks twice: from its own numbers.

A machine has one HAProxy and perhaps several gateways, of which one counts; if it dies, another goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import fcntl
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

logger = logging.getLogger("pliant")

_EVERY_S = 5.0
_WITHIN_S = 2.0
_MOST_BYTES = 2**20
_FRONTEND, _BACKEND, _SERVER = "0", "1", "2"
_CLASSES = ("4xx", "5xx")


_Cell = tuple[str, str, str]
"""Name, type and column of a number."""


class Seen(NamedTuple):
    """Since the last look."""

    answered: dict[str, int]
    """Requests that HAProxy answered itself, by the class of the status."""
    retried: int
    """Times that it asked another gateway."""


@dataclass
class Differences:
    """Of HAProxy's numbers between one look and the next. They begin again at 0 with a new process."""

    _before: dict[_Cell, int] = field(default_factory=dict)
    _owed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_CLASSES, 0))
    """Answers of gateways, negative, that the clients' side does not count yet: it does when they are whole."""

    def of(self, numbers: str) -> Seen:
        """What happened since the last look, or since HAProxy began. `numbers` are what "show stat" says; raises
        ValueError or KeyError if they are not, and knows what it knew."""
        rows = list(csv.DictReader(io.StringIO(numbers.removeprefix("# "))))
        if not rows:
            raise ValueError(f"no numbers: {numbers[:100]!r}")
        now = dict(_cells(rows))
        grown = {cell: self._grown(cell, value) for cell, value in now.items()}
        running = sum(int(row["scur"] or 0) for row in rows if row["type"] == _FRONTEND)
        answered = {each: self._settle(each, grown, running) for each in _CLASSES}
        self._before = now
        return Seen(answered, sum(more for (_, what, column), more in grown.items() if column == "wredis"))

    def _grown(self, cell: _Cell, value: int) -> int:
        before = self._before.get(cell, 0)
        return value - before if value >= before else value

    def _settle(self, status: str, grown: dict[_Cell, int], running: int) -> int:
        more = sum(
            by if type == _FRONTEND else -by for (_, type, column), by in grown.items() if column == f"hrsp_{status}"
        )
        owed = max(self._owed[status] + more, -running)
        self._owed[status] = min(owed, 0)
        return max(owed, 0)


def _cells(rows: list[dict[str, str]]) -> Iterator[tuple[_Cell, int]]:
    """What Serve's own proxy answers, while there is no gateway, is none of a gateway."""
    for row in rows:
        name, type = f"{row['pxname']}/{row['svname']}", row["type"]
        if type == _BACKEND:
            yield (name, type, "wredis"), int(row["wredis"] or 0)
        elif type == _FRONTEND or (type == _SERVER and row["bck"] == "0"):
            for each in _CLASSES:
                yield (name, type, f"hrsp_{each}"), int(row[f"hrsp_{each}"] or 0)


class Recorder(Protocol):
    """Counts on."""

    def saw(self, seen: Seen) -> None: ...


class HaproxyCounts:
    """Of the HAProxy that takes commands at `path`, if no other gateway of this machine counts them."""

    def __init__(self, path: Path, metrics: Recorder) -> None:
        self._path = path
        self._metrics = metrics

    async def run(self) -> None:
        """For ever."""
        with await _alone(self._path) as file:
            differences = Differences()
            with contextlib.suppress(KeyError, ValueError):  # nobody counted before, or died while it wrote
                differences.of(file.read())
            while True:
                try:
                    numbers = await _numbers(self._path)
                    self._metrics.saw(differences.of(numbers))
                    _keep(file, numbers)
                except (OSError, TimeoutError, KeyError, ValueError) as error:
                    logger.debug("HAProxy's numbers: %r", error)
                await asyncio.sleep(_EVERY_S)


async def _alone(path: Path) -> TextIO:
    """A file that no other gateway of this machine has, with the numbers that were counted last; it is given back with
    the process, however that ends."""
    while True:
        with contextlib.suppress(OSError):  # HAProxy's folder is not there yet
            file = path.with_name("counted.csv").open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another gateway counts
                file.close()
            else:
                file.seek(0)
                return file
        await asyncio.sleep(_EVERY_S)


def _keep(file: TextIO, numbers: str) -> None:
    file.truncate(0)
    file.write(numbers)
    file.flush()


async def _numbers(path: Path) -> str:
    async with asyncio.timeout(_WITHIN_S):
        reader, writer = await asyncio.open_unix_connection(os.fspath(path))
        try:
            writer.write(b"show stat\n")
            parts = []
            while part := await reader.read(65_536):
                parts.append(part)
                if sum(map(len, parts)) > _MOST_BYTES:
                    raise ValueError(f"more than {_MOST_BYTES} bytes of numbers")
            return b"".join(parts).decode()
        finally:
            writer.close()
