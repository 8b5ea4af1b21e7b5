"""What HAProxy answers itself, since no gateway does, and how often it asks twice: from its own numbers.

A machine has one HAProxy and perhaps several gateways, of which one counts; if it dies, another goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

from pliant.haproxy_numbers import CLASSES, Look, look

logger = logging.getLogger("pliant")

_EVERY_S = 2.0
_RETRIED = "retried"


class Seen(NamedTuple):
    """Since the last look."""

    answered: Mapping[str, int]
    """Requests that HAProxy answered itself, by the class of the status."""
    retried: int
    """Times that it asked another gateway."""


class Recorder(Protocol):
    """Counts on."""

    def saw(self, seen: Seen) -> None: ...


class Differences:
    """Between one look at HAProxy's numbers and the next."""

    def __init__(self, last: Mapping[str, int]) -> None:
        """After a look whose levels were `last`; none: since HAProxy began."""
        self.last = dict.fromkeys((*CLASSES, _RETRIED), 0) | dict(last)
        """Answers less those of gateways, by class, and what was asked twice."""
        self._owed = dict.fromkeys(CLASSES, 0)
        """Negative: answers of gateways that are under way, and not yet answered to clients."""

    def of(self, seen: Look) -> Seen:
        """What happened since the last look."""
        numbers = seen.numbers
        levels = {each: numbers.answered.get(each, 0) - numbers.by_gateways.get(each, 0) for each in CLASSES}
        owed = {each: max(self._owed[each] + levels[each] - self.last[each], -seen.running) for each in CLASSES}
        retried = max(0, numbers.retried - self.last[_RETRIED])
        self._owed = {each: min(owed[each], 0) for each in CLASSES}
        self.last = {**levels, _RETRIED: numbers.retried}
        return Seen({each: max(owed[each], 0) for each in CLASSES}, retried)


class HaproxyCounts:
    """Of the HAProxy that takes commands at `path`, if no other gateway of this machine counts them."""

    def __init__(self, path: Path, metrics: Recorder) -> None:
        self._path = path
        self._metrics = metrics

    async def run(self) -> None:
        """For ever."""
        with await _alone(self._path) as file:
            differences = Differences(_read(file))
            while True:
                try:
                    self._metrics.saw(differences.of(await asyncio.to_thread(look, self._path)))
                    _write(file, differences.last)
                except (OSError, ValueError) as error:
                    logger.debug("HAProxy's numbers: %r", error)
                await asyncio.sleep(_EVERY_S)


async def _alone(path: Path) -> TextIO:
    """A file that no other gateway of this machine has, with the levels at the last look; it is given back with the
    process, however that ends."""
    while True:
        with contextlib.suppress(OSError):  # HAProxy's folder is not there yet
            file = path.with_name("counted.json").open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another gateway counts
                file.close()
            else:
                return file
        await asyncio.sleep(_EVERY_S)


def _read(file: TextIO) -> Mapping[str, int]:
    file.seek(0)
    try:
        return dict(json.load(file))
    except (ValueError, TypeError):  # nobody counted before, or died while it wrote
        return {}


def _write(file: TextIO, levels: Mapping[str, int]) -> None:
    file.truncate(0)
    file.write(json.dumps(levels))
    file.flush()
