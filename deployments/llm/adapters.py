"""Adapters on their way from disk into an executor's memory and out of it, as the scheduler decides (Chameleon §4.1).

Pages and adapters share the executor's arena: pages from its front, as many as adapters leave room for. Bytes are
counted by the scheduler and its cache when it decides, so that what is carried out here always fits.
"""

from __future__ import annotations

from collections.abc import Iterable

from pliant.deployments.llm.adapter_loader import AdapterLoader, AdapterLoadError, AdapterTooLargeError, Loaded
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.executor import AdapterMemory
from pliant.deployments.llm.report import AdapterReport
from pliant.deployments.llm.waiting_room import AnswerScheduler
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.llm.jobs import SchedulerError
from pliant.policies.llm.recent_ratio import RecentRatio

_DECAY = 0.9
_MIB = 2**20
_COPIED_S = 1e-10
"""What a byte takes at least, as it is copied onto the device: those that are larger cost more to bring back."""

_HOTTEST = 12
"""Adapters whose uses are reported."""


def key(adapter: AdapterRef) -> str:
    """What the executor calls `adapter`."""
    return f"{adapter.key} {adapter.folder}"


class Adapters:
    """The adapters of `executor`; `loader` is None where requests have none."""

    def __init__(self, executor: AdapterMemory, scheduler: AnswerScheduler, loader: AdapterLoader | None) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._loader = loader
        self._installed: dict[AdapterRef, int] = {}
        """Bytes of each."""
        self._loading: dict[AdapterRef, int] = {}
        self._pinned: dict[AdapterRef, int] = {}
        self._load_s = 0.0
        self._read_s = RecentRatio(_DECAY)
        """Of a byte, from disk."""
        self._s_per_byte = RecentRatio(_DECAY)
        """Of a load, wherever it comes from."""

    @property
    def _longest(self) -> int:
        """Bytes of the longest text."""
        return -(-self._executor.max_length // self._executor.page) * self._executor.page_bytes

    def bytes(self, adapter: AdapterRef | None) -> int:
        """What `adapter` takes. Raises AdapterTooLargeError if it never fits beside a text and what is pinned."""
        if adapter is None:
            return 0
        if self._loader is None:
            raise AdapterLoadError(f"adapter {adapter.name} cannot be loaded: this service has no `adapters`")
        size = self._loader.bytes(adapter)
        room = self._executor.arena_bytes - self._longest - sum(self._pinned.values())
        if size > room and adapter not in self._pinned:
            raise AdapterTooLargeError(
                f"adapter {adapter.name} takes {size / _MIB:.1f} MiB, but one text and the pinned adapters leave "
                f"{max(room, 0) / _MIB:.1f} MiB: raise memory_mb, or use a smaller max_length"
            )
        return size

    def free_slots(self, adapter: AdapterRef | None, live: int, charge: int | None = None) -> int:
        """For how many more requests, one of them for `adapter`, there is room, were all idle adapters evicted.

        Each takes `charge` bytes, by default those of the longest text; `live` have slots.
        """
        room = self._executor.arena_bytes - self._scheduler.used + self._cache.idle
        if adapter and self._cache.state(adapter) == "absent":
            room -= self.bytes(adapter)
        return max(0, min(self._executor.slots - live, room // (charge or self._longest)))

    def ready_s(self, adapter: AdapterRef | None) -> float:
        """Seconds until `adapter`, if asked for now, is installed, as predicted from the loads before."""
        if adapter is None or adapter in self._installed or (self._loader and adapter in self._loader.host):
            return 0.0
        ahead = sum(self._loading.values()) + (0 if adapter in self._loading else self.bytes(adapter))
        return ahead * self._read_s.value

    def load_s(self, bytes: int) -> float:
        """Seconds that a load of so many bytes takes, as predicted from those before, from disk or not."""
        return bytes * max(self._s_per_byte.value, _COPIED_S)

    @property
    def loading(self) -> bool:
        """Whether loads are under way."""
        return bool(self._loading)

    def loading_s(self) -> float:
        """Seconds that the load under way has taken; 0 when none is. For any thread."""
        return self._loader.loading_s() if self._loader else 0.0

    def limit_loads(self, seconds: float) -> None:
        """Give loads up that take longer: whoever waits for them gets an AdapterLoadError."""
        if self._loader:
            self._loader.limit_s = seconds

    def collect(self, now: float) -> list[tuple[Answer, AdapterLoadError]]:
        """Install what has been loaded; whoever waits in vain, because it failed."""
        finished = self._loader.finished() if self._loader else []
        return [in_vain for loaded in finished for in_vain in self._settle(loaded, now)]

    def _settle(self, loaded: Loaded, now: float) -> list[tuple[Answer, AdapterLoadError]]:
        adapter, size = loaded.ref, self._loading.pop(loaded.ref)
        self._load_s += loaded.seconds
        if isinstance(loaded.blob, AdapterLoadError):
            return [(answer, loaded.blob) for answer in self._scheduler.load_failed(adapter)]
        self._s_per_byte.add(loaded.seconds, size)
        if not loaded.kept:
            self._read_s.add(loaded.seconds, size)
        self._executor.install(key(adapter), adapter.ranks, loaded.blob)
        self._installed[adapter] = size
        self._scheduler.loaded(adapter, now)
        return []

    def evict(self, adapters: Iterable[AdapterRef]) -> None:
        """Remove what the scheduler has evicted."""
        for adapter in adapters:
            self._executor.remove(key(adapter))
            del self._installed[adapter]

    def load(self, adapters: Iterable[AdapterRef]) -> None:
        """Begin the loads that the scheduler asks for."""
        for adapter in adapters:
            assert self._loader
            self._loading[adapter] = self._loader.bytes(adapter)
            self._loader.begin(adapter)

    def pin(self, adapter: AdapterRef) -> None:
        """Set memory aside for `adapter`, which stays once it is loaded. Raises AdapterLoadError if it does not fit."""
        size = self.bytes(adapter)
        self._scheduler.pin(adapter, size)
        self._pinned[adapter] = size

    def load_now(self, adapter: AdapterRef, now: float) -> None:
        """Load a pinned `adapter`, as the scheduler has asked, before this returns. Raises AdapterLoadError."""
        assert self._loader
        self._loading[adapter] = self._pinned[adapter]
        loaded = self._loader.load(adapter)
        self._settle(loaded, now)
        if isinstance(loaded.blob, AdapterLoadError):
            del self._pinned[adapter]
            raise loaded.blob

    def wait(self, timeout_s: float) -> None:
        """Return when something has been loaded, or after `timeout_s` seconds; at once if nothing ever is."""
        if self._loader:
            self._loader.wait(timeout_s)

    def close(self) -> None:
        if self._loader:
            self._loader.close()

    def report(self) -> AdapterReport:
        stats = self._cache.stats
        return AdapterReport(
            resident=[adapter.name for adapter in list(self._installed)],
            hottest={adapter.name: uses for adapter, uses in self._cache.hottest(_HOTTEST)},
            bytes=self._cache.bytes,
            hits=stats.hits,
            misses=stats.misses,
            loads=stats.loads,
            failed_loads=stats.failed_loads,
            load_s=round(self._load_s, 3),
            host_hits=self._loader.host.hits if self._loader else 0,
            host_bytes=self._loader.host.bytes if self._loader else 0,
            evictions={str(reason): count for reason, count in list(stats.evictions.items())},
        )

    def check(self) -> None:
        """Raise SchedulerError unless what is installed is what the cache takes for resident, and fits."""
        resident = set(self._cache.resident())
        if resident != self._installed.keys():
            raise SchedulerError(f"{len(self._installed)} adapters are installed, the cache has {len(resident)}")
        counted = sum(self._installed.values()) + sum(self._loading.values())
        if counted != self._cache.bytes:
            raise SchedulerError(f"adapters take {counted} bytes, the cache counts {self._cache.bytes}")
        if self._scheduler.used > self._executor.arena_bytes:
            raise SchedulerError(f"{self._scheduler.used} bytes are given out, of {self._executor.arena_bytes}")
