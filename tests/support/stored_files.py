"""Storages for tests: in memory, with steps that others come between, and with faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from pliant.deployments.serving.state.storage import Storage

T = TypeVar("T")

Fault = Literal["", "before", "after", "torn"]
"""Of a step: it fails and does nothing; it does its work, and fails; half of its content arrives, and it fails."""


class MemoryStorage:
    """Files by path."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self.files if path.rpartition("/")[0] == folder]

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    def create(self, path: str, content: bytes) -> None:
        if path in self.files:
            raise FileExistsError(17, "File exists", path)
        self.files[path] = content

    def rename(self, path: str, to: str) -> None:
        self.files[to] = self.read(path)
        del self.files[path]

    def remove(self, path: str) -> None:
        if self.files.pop(path, None) is None:
            raise FileNotFoundError(2, "No such file or directory", path)


class FaultyStorage:
    """`files`, whose next steps have the faults that `fault` gives; to remove is none, as nothing depends on it."""

    def __init__(self, files: Storage, fault: Callable[[], Fault]) -> None:
        self._files = files
        self._fault = fault

    def names(self, folder: str) -> list[str]:
        return self._step(lambda: self._files.names(folder))

    def read(self, path: str) -> bytes:
        return self._step(lambda: self._files.read(path))

    def create(self, path: str, content: bytes) -> None:
        half = content[: len(content) // 2]
        self._step(lambda: self._files.create(path, content), lambda: self._files.create(path, half))

    def rename(self, path: str, to: str) -> None:
        self._step(lambda: self._files.rename(path, to))

    def remove(self, path: str) -> None:
        self._files.remove(path)

    def _step(self, work: Callable[[], T], torn: Callable[[], object] | None = None) -> T:
        fault = self._fault()
        if fault == "torn" and torn:
            torn()
        done = work() if fault in ("", "after") else None
        if fault:
            raise OSError(5, "I/O error")
        return done  # type: ignore[return-value]


class Interleaved:
    """Scripts that run in threads, one step at a time: each waits in `step` until it is its turn."""

    def __init__(self, scripts: Sequence[Callable[[Callable[[], Fault]], None]]) -> None:
        self._faults: list[Fault] = [""] * len(scripts)
        self._go = [threading.Semaphore(0) for _ in scripts]
        self._waits = [threading.Semaphore(0) for _ in scripts]
        self._running = [True] * len(scripts)
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(index, script), daemon=True)
            for index, script in enumerate(scripts)
        ]
        for thread, waits in zip(self._threads, self._waits, strict=True):
            thread.start()
            waits.acquire()

    def turn(self, index: int, fault: Fault = "") -> bool:
        """Let a script take its next step, with a `fault`; whether it had one to take."""
        if not self._running[index]:
            return False
        self._faults[index] = fault
        self._go[index].release()
        self._waits[index].acquire()
        return True

    def finish(self) -> None:
        """Let all of them run to their ends, and raise what they raised."""
        for index in range(len(self._threads)):
            while self.turn(index):
                pass
        if self._errors:
            raise self._errors[0]

    def _run(self, index: int, script: Callable[[Callable[[], Fault]], None]) -> None:
        def step() -> Fault:
            self._waits[index].release()
            self._go[index].acquire()
            return self._faults[index]

        try:
            script(step)
        except BaseException as error:
            self._errors.append(error)
        self._running[index] = False
        self._waits[index].release()
