"""Reads adapters in a thread of its own, so that the decode loop never waits for a disk (Chameleon §4.1).

Whoever asks for loads counts their bytes first; here is only bounded how many may be under way, and for how long. What
is read is handed over to the engine's thread, which alone puts it where iterations use it, and kept in the host's
memory as far as that goes: such an adapter waits for no read, neither its own nor others'. A read that never ends
cannot be ended from outside: then all loads fail until it does, and the replica reports an error.
"""

from __future__ import annotations

import math
import time
from collections import deque
from threading import Condition, Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pliant.deployments.llm.host_tier import HostTier
from pliant.errors import PliantError
from pliant.formats.adapter_info import AdapterError, AdapterInfo, AdapterRef, bytes_of, read_adapter
from pliant.models.decoder_shape import DecoderShape

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 8
_JOIN_S = 5.0


class AdapterLoadError(PliantError):
    """An adapter that a replica cannot load, or has no room for."""


class AdapterTooLargeError(AdapterLoadError):
    """An adapter for which this replica will never have room."""


class Stager(Protocol):
    """What brings an adapter's weights to the device, as `pliant.kernels.decoder.executor` does."""

    shape: DecoderShape

    def stage(self, adapter: AdapterInfo) -> Tensor: ...


class AdapterReader(Protocol):
    """Where adapters come from."""

    def bytes(self, ref: AdapterRef) -> int:
        """What it takes in the executor's memory."""

    def stage(self, ref: AdapterRef) -> Tensor:
        """Its weights, flat, as the executor installs them. Slow, and called from another thread."""


class PeftFolders:
    """Adapters in PEFT folders, of ranks up to `most_rank`, staged by `stager` in a dtype of `dtype_bytes`.

    Where `processes` compute the model together, bytes are those of each.
    """

    def __init__(self, stager: Stager, dtype_bytes: int, most_rank: int, processes: int = 1) -> None:
        self._stager = stager
        self._dtype_bytes = dtype_bytes
        self._most_rank = most_rank
        self._share = stager.shape.of_rank(processes)

    def bytes(self, ref: AdapterRef) -> int:
        return bytes_of(ref.ranks, self._share, self._dtype_bytes)

    def stage(self, ref: AdapterRef) -> Tensor:
        """Raises AdapterError, also when the folder holds other weights than when it was registered."""
        info = read_adapter(ref.folder, self._stager.shape, self._most_rank)
        if info.revision != ref.revision:
            raise AdapterError(f"{ref.name} has changed since it was registered; load the adapter again")
        return self._stager.stage(info)


class Loaded(NamedTuple):
    """A load that is over."""

    ref: AdapterRef
    seconds: float
    blob: Tensor | AdapterLoadError
    """Its weights, or why there are none."""
    kept: bool = False
    """Whether it was in the host's memory."""


class _UnderWay(NamedTuple):
    """A load that the thread is at."""

    ref: AdapterRef
    since: float


class AdapterLoader:
    """Loads from `host`, or else from `source`, one after another; at most `most` are under way until handed over.

    All methods but `loading_s` are for one thread, the engine's. The loader's own starts with the first load, and ends
    with `close`.
    """

    def __init__(self, source: AdapterReader, most: int = _MOST, host: HostTier | None = None) -> None:
        self.host = host or HostTier()
        """To be read."""
        self._source = source
        self._most = most
        self._changed = Condition()
        self._asked: deque[AdapterRef] = deque()
        self._finished: deque[Loaded] = deque()
        self._under_way: _UnderWay | None = None
        self._given_up = False
        """Whether the load under way was handed over as failed."""
        self._closed = False
        self._thread: Thread | None = None
        self.limit_s = math.inf
        """Seconds after which a load is given up, and with it those that wait for it to end."""
        self.pending = 0
        """Loads that were asked for and not yet handed over."""

    def bytes(self, ref: AdapterRef) -> int:
        """What `ref` takes in the executor's memory."""
        return self._source.bytes(ref)

    def load(self, ref: AdapterRef) -> Loaded:
        """Load `ref` on the calling thread."""
        started = time.monotonic()
        blob: Tensor | AdapterLoadError
        try:
            blob = self._source.stage(ref)
        except AdapterError as error:
            blob = AdapterLoadError(f"adapter {ref.name} cannot be loaded: {error}")
        except Exception as error:
            blob = AdapterLoadError(f"adapter {ref.name} cannot be loaded: {type(error).__name__}: {error}")
        return Loaded(ref, time.monotonic() - started, blob)

    def begin(self, ref: AdapterRef) -> None:
        """Load `ref`: at once if it is in the host's memory, else after those asked for before.

        Raises RuntimeError when there are too many, or after `close`.
        """
        if self._closed or self.pending >= self._most:
            state = "it is closed" if self._closed else f"{self.pending} loads are under way, of at most {self._most}"
            raise RuntimeError(f"{ref.name} cannot be loaded: {state}")
        self.pending += 1
        if (blob := self.host.get(ref)) is not None:
            with self._changed:
                self._finished.append(Loaded(ref, 0.0, blob, kept=True))
            return
        with self._changed:
            self._asked.append(ref)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = Thread(target=self._run, name="adapter-loader", daemon=True)
            self._thread.start()

    def finished(self) -> list[Loaded]:
        """The loads that are over, or given up, each once."""
        with self._changed:
            self._give_up()
            finished = list(self._finished)
            self._finished.clear()
        self.pending -= len(finished)
        for loaded in finished:
            if not isinstance(loaded.blob, AdapterLoadError):
                self.host.keep(loaded.ref, loaded.blob)
        return finished

    def loading_s(self) -> float:
        """Seconds that the load under way has taken; 0 when none is. For any thread."""
        under_way = self._under_way
        return time.monotonic() - under_way.since if under_way else 0.0

    def _give_up(self) -> None:
        """Whatever the thread will not come to, if it has been at one load for too long."""
        under_way, seconds = self._under_way, self.loading_s()
        if under_way is None or seconds <= self.limit_s:
            return
        refs = [*self._asked] if self._given_up else [under_way.ref, *self._asked]
        self._asked.clear()
        self._given_up = True
        why = f"{under_way.ref.name} has been read for {seconds:.0f} s and no end; check the disk that it is on"
        for ref in refs:
            error = AdapterLoadError(f"adapter {ref.name} cannot be loaded: {why}")
            self._finished.append(Loaded(ref, seconds if ref is under_way.ref else 0.0, error))

    def wait(self, timeout_s: float) -> None:
        """Return when a load is over, or after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished), timeout_s)

    def close(self) -> None:
        """End the thread after the load under way; those behind it are forgotten."""
        with self._changed:
            self._closed = True
            self._asked.clear()
            self._changed.notify_all()
        if self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed)
                if self._closed:
                    return
                ref = self._asked.popleft()
                self._under_way = _UnderWay(ref, time.monotonic())
            loaded = self.load(ref)
            with self._changed:
                if not self._given_up:
                    self._finished.append(loaded)
                self._under_way, self._given_up = None, False
                self._changed.notify_all()
