"""What a trace says of an answer in a replica: how long it waited for a slot, how long its prompt took, and all steps
after that in one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pliant.deployments.llm.request import Piece
from pliant.deployments.serving import tracing


class Steps:
    """Notes the pieces of one answer as they are given away; several steps may come in one if a reader is slow."""

    def __init__(self, work: tracing.Work) -> None:
        self._work = work
        self._pieces = self._tokens = 0
        self._longest_s = 0.0
        self._last = 0.0

    def gave(self, piece: Piece) -> None:
        """One more."""
        now = time.monotonic()
        if self._pieces:
            self._longest_s = max(self._longest_s, now - self._last)
            self._tokens += len(piece.tokens)
        else:
            self._work.part("queue", but_s=piece.prompt_s or 0.0)
            self._work.part("prompt")
        self._last = now
        self._pieces += 1

    def over(self) -> None:
        """There are no more."""
        if self._pieces > 1:
            longest_ms = self._longest_s * 1e3
            said = {"pliant.steps": self._pieces - 1, "pliant.tokens": self._tokens, "pliant.longest_ms": longest_ms}
            self._work.part("steps", attributes=said)


@contextmanager
def steps(service: str, trace: str) -> Iterator[Steps | None]:
    """For an answer of `service` that is a part of `trace`; None if that is not wanted. See `tracing.work`."""
    work = tracing.work(service, trace)
    if work is None:
        yield None
        return
    with work:
        noted = Steps(work)
        try:
            yield noted
        finally:
            noted.over()
