"""Heavy work on one machine takes turns: what trains a model or compiles a runtime, and replicas that load.

More at once than there are CPUs would only slow each other, and what already serves. Whoever waits says how urgent its
job is; of those who wait when a job ends, the most urgent one is next. A queue is a folder of files in the cache, each
locked by whoever waits: a process that dies leaves it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from pliant.cache import Progress, cache_folder

_POLL_S = 0.2

Urgency = tuple[float, ...]
"""The least is the most urgent."""


class Queue(NamedTuple):
    """Of what so many jobs run at a time."""

    name: str
    places: int


_CPUS = len(os.sched_getaffinity(0))
BACKGROUND = Queue("background", max(1, min(4, _CPUS - 1)))
"""Trains and compiles, on one CPU each; what compiles takes much memory, so there are few."""
LONG = Queue("long", 1) if _CPUS > 1 else BACKGROUND
"""Trains what takes long: it would hold up all others if it came first, and itself if it came last."""
LOADING = Queue("loading", _CPUS)
"""Replicas that load."""

TRAIN, COMPILE = 0.0, 1.0
"""The first number of an urgency: nothing answers without a model, and a compiled one only answers faster."""


@contextmanager
def turn(
    job: str,
    urgency: Callable[[], Urgency],
    report: Progress | None = None,
    queue: Queue = BACKGROUND,
) -> Iterator[None]:
    """Wait until `queue` has a place on this machine and nothing that waits is more urgent; then run.

    `urgency` is asked again and again while this waits. `report` hears which job has the turn. The thread that leaves
    it may be another than the one that entered it.
    """
    folder = cache_folder() / "turns" / queue.name
    folder.mkdir(parents=True, exist_ok=True)
    place = None
    ticket = _Ticket(folder)
    try:
        while place is None:
            if ticket.first(urgency()):
                place = next(
                    (place for place in map(partial(_Place, folder), range(queue.places)) if place.taken()), None
                )
            if place is None:
                if report and (other := _read(folder / "0.json")):
                    report(f"waiting for {other}", 0.0)
                time.sleep(_POLL_S)
    finally:
        ticket.give_up()
    try:
        place.name(job)
        yield
    finally:
        place.give_up()


def busy(queue: Queue) -> bool:
    """Whether a job of `queue` runs on this machine."""
    folder = cache_folder() / "turns" / queue.name
    return any(_Place(folder, number).busy() for number in range(queue.places)) if folder.exists() else False


class _Place:
    """Where a job runs."""

    def __init__(self, folder: Path, number: int) -> None:
        self._job = folder / f"{number}.json"
        self._lock = _lock(folder / f"{number}.lock")

    def taken(self) -> bool:
        """Whether it was free, and is held now."""
        return _taken(self._lock)

    def busy(self) -> bool:
        """Whether another holds it."""
        if not self.taken():
            return True
        self._lock.release()
        return False

    def name(self, job: str) -> None:
        """Let others know what runs."""
        self._job.write_text(json.dumps(job))

    def give_up(self) -> None:
        self._job.unlink(missing_ok=True)
        self._lock.release()


class _Ticket:
    """A place in the queue."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queue = _lock(folder / "queue.lock")
        self._file = folder / f"{time.time_ns():020}-{uuid.uuid4().hex}.ticket"
        """Of two that are equally urgent, the older is next."""
        self._mine = _lock(self._file.with_suffix(".alive"))
        with self._queue:
            self._mine.acquire()

    def first(self, urgency: Urgency) -> bool:
        """Whether nobody who waits is more urgent."""
        with self._queue:
            self._file.write_text(json.dumps(urgency))
            waiting = [(_read(file), file.name) for file in self._folder.glob("*.ticket") if self._alive(file)]
        return min(waiting)[1] == self._file.name

    def give_up(self) -> None:
        with self._queue:
            self._mine.release()
            self._remove(self._file)

    def _alive(self, file: Path) -> bool:
        if file == self._file:
            return True
        lock = _lock(file.with_suffix(".alive"))
        if not _taken(lock):
            return True
        lock.release()
        self._remove(file)
        return False

    def _remove(self, file: Path) -> None:
        for each in (file, file.with_suffix(".alive")):
            each.unlink(missing_ok=True)


def _lock(file: Path) -> FileLock:
    return FileLock(file, thread_local=False)


def _taken(lock: FileLock) -> bool:
    """Whether `lock` was free, and is held now."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _read(file: Path) -> object:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return None
