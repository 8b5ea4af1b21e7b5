"""Heavy work on one machine, one job at a time: what trains a model or compiles a runtime takes its turn.

Several at once would only slow each other, and what already serves. Whoever waits says how urgent its job is; of those
who wait when a job ends, the most urgent one is next. The queue is a folder of files in the cache, each locked by
whoever waits: a process that dies leaves it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pliant.cache import Progress, cache_folder

_POLL_S = 0.2

Urgency = tuple[float, ...]
"""The least is the most urgent."""

TRAIN, COMPILE = 0.0, 1.0
"""The first number of an urgency: nothing answers without a model, and a compiled one only answers faster."""


@contextmanager
def turn(job: str, urgency: Callable[[], Urgency], report: Progress | None = None) -> Iterator[None]:
    """Wait until no other heavy job runs on this machine and none that waits is more urgent; then run within.

    `urgency` is asked again and again while this waits. `report` hears which job has the turn.
    """
    folder = cache_folder() / "turns"
    folder.mkdir(parents=True, exist_ok=True)
    running = FileLock(folder / "running.lock")
    ticket = _Ticket(folder)
    try:
        while not ticket.first(urgency()) or not _taken(running):
            if report and (other := _read(folder / "running.json")):
                report(f"waiting for {other}", 0.0)
            time.sleep(_POLL_S)
    finally:
        ticket.give_up()
    try:
        (folder / "running.json").write_text(json.dumps(job))
        yield
    finally:
        (folder / "running.json").unlink(missing_ok=True)
        running.release()


class _Ticket:
    """A place in the queue."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queue = FileLock(folder / "queue.lock")
        self._file = folder / f"{time.time_ns():020}-{uuid.uuid4().hex}.ticket"
        """Of two that are equally urgent, the older is next."""
        self._mine = FileLock(self._file.with_suffix(".alive"))
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
        lock = FileLock(file.with_suffix(".alive"))
        if not _taken(lock):
            return True
        lock.release()
        self._remove(file)
        return False

    def _remove(self, file: Path) -> None:
        for each in (file, file.with_suffix(".alive")):
            each.unlink(missing_ok=True)


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
