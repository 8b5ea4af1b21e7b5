"""A replica that does what its scheduler says, with its own count of everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pliant.policies.llm.adapter_cache import AdapterCache, Eviction
from pliant.policies.llm.arrival_histogram import ArrivalHistogram
from pliant.policies.llm.jobs import Decisions, Job
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClass, QueueClasses
from pliant.policies.llm.queue_order import Queues
from pliant.policies.llm.request_scheduler import Scheduler

STEP_S = 0.2
Quotas = Sequence[tuple[int, int]]


class FixedClasses(QueueClasses):
    """Classes by prompt: (longest prompt, quota)."""

    def __init__(self, quotas: Quotas) -> None:
        super().__init__(slo_s=1.0)
        self.quotas = quotas
        self.changed = True

    def due(self, now: float) -> bool:
        return self.changed

    def classify(self, prompt: int, output: int, adapter_bytes: int) -> int:
        return sum(prompt > longest for longest, _ in self.quotas[:-1]) if not self.changed else 0

    def learn(self, now: float, total: int) -> list[QueueClass]:
        self.changed = False
        return [QueueClass(longest, quota) for longest, quota in self.quotas]


@dataclass
class Replica:
    """What an engine does with a scheduler, with its own count of everything.

    A load takes `load_s` seconds. Requests end when they have had the tokens that `answers` says, or as predicted.
    """

    queues: Queues[int, str]
    total: int
    load_s: Callable[[str], float] = lambda adapter: 1.0
    eviction: Eviction = "compound"
    slots: int = 1000
    prefetch: bool = True
    histogram: ArrivalHistogram[str] | None = None
    window_s: float = 300.0
    prompts: int = 10**6
    answers: dict[int, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """Adapters whose loads fail."""

    def __post_init__(self) -> None:
        cache: AdapterCache[str] = AdapterCache(self.eviction, self.window_s)
        self.scheduler: Scheduler[int, str] = Scheduler(
            self.queues, cache, self.total, self.prefetch, self.histogram, slots=min(self.slots, self.total)
        )
        self.now = 0.0
        self.jobs: dict[int, Job[int, str]] = {}
        self.live: dict[int, Job[int, str]] = {}
        self.tokens: Counter[int] = Counter()
        self.resident: dict[str, int] = {}
        self.loading: dict[str, float] = {}
        self.sizes: dict[str, int] = {}
        self.admitted: list[int] = []
        self.squashed: list[int] = []
        self.ends: list[tuple[int, str]] = []
        self.head_since: dict[int, float] = {}
        self.longest_head_wait_s = 0.0

    def add(
        self, key: int, output: int = 10, charge: int = 1, adapter: str = "", bytes: int = 0, prompt: int = 1
    ) -> None:
        """An empty `adapter` is none."""
        self.jobs[key] = Job(key, prompt, output, charge, adapter or None, bytes, self.now)
        if adapter:
            assert self.sizes.setdefault(adapter, bytes) == bytes
        self.answers.setdefault(key, output)
        self.scheduler.add(self.jobs[key], self.now)

    def step(self) -> Decisions[int, str]:
        """One iteration, as the engine has it."""
        for adapter in [adapter for adapter, end in self.loading.items() if end <= self.now]:
            del self.loading[adapter]
            if adapter in self.broken:
                for key in self.scheduler.load_failed(adapter):
                    assert self.jobs[key].adapter == adapter
                    self.end(key, "failed")
            else:
                self.resident[adapter] = self.sizes[adapter]
                self.scheduler.loaded(adapter, self.now)
        decisions = self.scheduler.schedule(self.now, self.slots - len(self.live), self.prompts)
        self.carry_out(decisions)
        self.now += STEP_S
        for key in list(self.live):
            self.tokens[key] += 1
            self.scheduler.generated(key, self.tokens[key])
            if self.tokens[key] >= self.answers[key]:
                self.scheduler.ended(key, self.now)
                self.end(key, "answered")
        return decisions

    def carry_out(self, decisions: Decisions[int, str]) -> None:
        in_use = {job.adapter for job in self.live.values()}
        for adapter in decisions.evict:
            assert adapter not in in_use or any(self.live[key].adapter == adapter for key in decisions.squash)
            del self.resident[adapter]
        for key in decisions.squash:
            del self.live[key]
            self.squashed.append(key)
        for adapter in decisions.load:
            assert adapter not in self.resident
            assert adapter not in self.loading
            self.loading[adapter] = self.now + self.load_s(adapter)
        for job in decisions.admit:
            assert job.key not in self.live
            assert job.adapter is None or job.adapter in self.resident
            self.live[job.key] = job
            self.admitted.append(job.key)
        used = sum(job.charge for job in self.live.values()) + sum(self.resident.values())
        used += sum(self.sizes[adapter] for adapter in self.loading)
        assert self.scheduler.used == used <= self.total
        assert len(self.live) <= self.slots
        assert self.live or self.loading or not any(lane.jobs for lane in self.queues.lanes), "everybody waits"
        self.watch_heads()

    def watch_heads(self) -> None:
        """How long those have waited that are, or were, the first of their queues."""
        for lane in self.queues.lanes:
            for job in lane.jobs[:1]:
                self.head_since.setdefault(job.key, self.now)
        for key in [key for key in self.head_since if key in self.live or key not in self.jobs]:
            self.longest_head_wait_s = max(self.longest_head_wait_s, self.now - self.head_since.pop(key))

    def cancel(self, key: int) -> None:
        """Whether it waits or runs."""
        self.scheduler.cancel(key, self.now)
        self.end(key, "cancelled")

    def end(self, key: int, how: str) -> None:
        self.ends.append((key, how))
        del self.jobs[key]
        self.live.pop(key, None)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def multi_queue(*quotas: tuple[int, int], patience_s: float = 1.0) -> MultiQueue[int, str]:
    return MultiQueue(FixedClasses(quotas), patience_s)
