"""Stand-ins for what engines and planners talk to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.messages import Report
from pliant.errors import CannotCompileError
from pliant.formats.profile import Profile

SERVICE_S = 0.02


def report(max_length: int, version: int = 1, service_s: float = 0.01, failed: dict[int, str] | None = None) -> Report:
    return Report(
        version=version,
        max_length=max_length,
        home=max_length,
        held={},
        service_s=service_s,
        curve=((max_length, service_s, service_s),) if max_length else (),
        shares=(),
        backend="aoti",
        device="a processor",
        resident=False,
        reason="",
        compiling=[],
        uncompiled={},
        failed=failed or {},
        waiting=0,
        tenants={},
        margins={},
        served=0,
        passes=0,
        tokens=0,
        computed_tokens=0,
        p50_ms=0.0,
        p98_ms=0.0,
    )


class Sleeper:
    """A runtime that only sleeps. Its logits are how many ids it got and the first of them."""

    def __init__(
        self, max_length: int, dynamic: bool = False, service_s: float = SERVICE_S, backend: str = "sleeper"
    ) -> None:
        self.max_length = max_length
        self.backend = backend
        self.dynamic = dynamic
        self._service_s = service_s
        self.seen: list[int] = []
        self.fails: Exception | None = None
        """Raised instead of an answer."""

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        if self.fails:
            raise self.fails
        time.sleep(self._service_s)
        self.seen.append(int(ids[0]))
        return np.array([len(ids), ids[0]], dtype=np.float32)


class Bed:
    """A megabyte for each token of all `sleepers` that were ever loaded, and some that they share."""

    def __init__(self, sleepers: Sleepers, room_mb: float) -> None:
        self._sleepers = sleepers
        self.room_mb = room_mb

    def used_mb(self) -> float:
        loaded = self._sleepers.loaded
        return 40.0 * bool(loaded) + sum(each.max_length for each in loaded)


class Sleepers:
    """Loads sleepers, except those of the lengths that are `broken`."""

    profile = None
    device = "a bed"
    resident = False
    reason = "they only sleep"

    def __init__(
        self,
        lengths: tuple[int, ...] = (8, 16),
        dynamic: bool = False,
        service_s: float = SERVICE_S,
        per_token_s: float = 0.0,
    ) -> None:
        self.lengths = lengths
        self._service_s = service_s
        self._per_token_s = per_token_s
        self.broken: set[int] = set()
        self.loaded: list[Sleeper] = []
        self.backend = "sleeper"
        """Of those that are loaded from now on."""
        self.uncompiled: set[int] = set()
        self.uncompilable: set[int] = set()
        self.compiled: list[int] = []
        """What was to be compiled, in order."""
        self._dynamic = dynamic
        self.memory: Bed | None = None

    def missing(self) -> set[int]:
        return set(self.uncompiled)

    def settle_lengths(self) -> None: ...

    def compile(self, max_length: int, urgency: Callable[[], float]) -> None:
        self.compiled.append(max_length)
        if max_length in self.uncompilable:
            raise CannotCompileError(f"no compiler for {max_length}")
        self.uncompiled.discard(max_length)

    def load(self, max_length: int) -> Runtime:
        if max_length in self.broken:
            raise OSError(f"cannot load {max_length}")
        service_s = self._service_s + max_length * self._per_token_s
        backend = "eager" if max_length in self.uncompiled else self.backend
        self.loaded.append(Sleeper(max_length, self._dynamic, service_s, backend))
        return self.loaded[-1]


def profile(static_share: float) -> Profile:
    """Static runtimes take this share of a dynamic one's time, which grows with length."""
    lengths = tuple(range(8, 513, 8))
    dynamic_s = tuple(1e-3 + 1e-5 * length for length in lengths)
    return Profile(
        model="m",
        device="d",
        dtype="float32",
        threads=1,
        torch="2",
        lengths=lengths,
        dynamic_s=dynamic_s,
        static_s=tuple(static_share * seconds for seconds in dynamic_s),
        static_at=(512,),
        steps=(),
    )
