"""The processes of ranks 1 and up: rank 0 starts them, gives them orders, and ends them with itself.

Orders are calls of an executor's methods, and go through a socket to each process. A process whose socket is closed,
because rank 0 has ended, ends too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from pliant.kernels.decoder.ranks import RankError, Ranks
from pliant.models.decoder_shape import Quantize

_ENDS_WITHIN_S = 2.0
"""How long a process may take to end after its socket was closed."""


@dataclass(frozen=True)
class Setting:
    """What a rank computes; sizes are those that rank 0 has chosen."""

    folder: Path
    dtype: str
    quantize: Quantize | None
    device: str
    threads: int
    slots: int
    max_length: int
    arena_bytes: int
    most_rank: int
    count: int
    limit_s: float
    rank: int = 0
    meeting: Path = Path()
    """A file by which the ranks find each other, over NCCL at their first sum; it is there as long as the crew."""

    def device_of_rank(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.device == "cuda" else torch.device(self.device)


class Crew:
    """The other ranks' processes, loading while the caller, who is rank 0, does; `ready` waits for them.

    Any call raises RankError when a rank ended or does not answer, ends all of them, and does so from then on.
    """

    def __init__(self, setting: Setting) -> None:
        self._limit_s = setting.limit_s
        self._failure: RankError | None = None
        self._lines: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._lines, self._processes)
        self._folder = tempfile.TemporaryDirectory(prefix="pliant-ranks-")
        with self.watched():
            setting = replace(setting, meeting=Path(self._folder.name) / "meeting")
            for rank in range(1, setting.count):
                line, theirs = Pipe()
                command = [sys.executable, "-m", "pliant.kernels.decoder.rank", str(theirs.fileno())]
                self._lines.append(line)
                self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
                theirs.close()
                line.send(replace(setting, rank=rank))
            self._hear()
            self.ranks = Ranks(setting.meeting, 0, setting.count, setting.limit_s, setting.device_of_rank())

    def ready(self) -> None:
        """Wait until all have loaded; loading has no limit, but a process that fails ends it."""
        with self.watched():
            self._hear()

    def order(self, method: str, *arguments: Any) -> None:
        """Have each rank call this method of its executor."""
        for line in self._lines:
            line.send((method, arguments))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is done within ends all ranks if it fails: they would wait for what does not come."""
        if self._failure:
            raise self._failure
        try:
            yield
        except (RankError, OSError, EOFError) as error:
            if error is not self._failure:
                self._fail(error)
            raise
        except BaseException:
            self._failure = RankError("the ranks were ended because a step failed on rank 0")
            self._end()
            raise

    def _hear(self) -> None:
        """What each has to say: nothing, or why it fails."""
        for line in self._lines:
            if problem := line.recv():
                raise problem

    def _reported(self) -> Exception | None:
        """What a rank says that has failed, and ended before rank 0 heard of it."""
        for line in self._lines:
            with suppress(OSError, EOFError):
                while line.poll():
                    if problem := line.recv():
                        return cast(Exception, problem)
        return None

    def _fail(self, error: Exception) -> NoReturn:
        if problem := self._reported():
            self._failure = RankError(f"a rank failed: {problem}")
            self._end()
            raise problem
        codes = {rank: _code(process) for rank, process in enumerate(self._processes, 1)}
        ended = [f"rank {rank} ended with exit code {code}" for rank, code in codes.items() if code is not None]
        told = "; ".join(ended) or f"a rank did not answer within {self._limit_s:g} s: {error}"
        self._failure = RankError(f"of {len(codes) + 1} ranks that compute the model, {told}")
        self._end()
        raise self._failure from error


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """With what it ended, if it did: that its socket was closed is known a moment before."""
    try:
        return process.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def _end(lines: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
    for line in lines:
        line.close()
    for process in processes:
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()  # which ends one that is stopped, too
            process.wait()
