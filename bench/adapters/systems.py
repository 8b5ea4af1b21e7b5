"""What is compared: schedulers, caches and predictors, of the paper, of those it compares itself to, and ours (§5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from pliant.policies.llm.adapter_cache import AdapterCache, Eviction
from pliant.policies.llm.arrival_histogram import ArrivalHistogram
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.simulation.llm.simulator import OUR_LOOP, Loop

ACCURACY = 0.8
"""Of the predictor, unless something else is said (§5.4)."""
LOADS = 64
"""That may be under way at a time, so that none has to wait for an iteration to be begun; the link is what limits."""

S_LORA_LOOP = Loop(every=10, stalls=True, prompts_share=1 / 6, prompts_apart=True)
"""As S-LoRA's published code has it: its router waits for max_wait_tokens, 10, decode steps before it forms a batch of
at most a sixth of the memory's tokens, and loads the adapters of the batch, as far as they were not prefetched, before
it goes on."""


@dataclass(frozen=True)
class System:
    """A way to serve. `accuracy` is that of an oracle that errs; None is our own predictor, which learns."""

    name: str
    order: Literal["fifo", "sjf", "multi_queue", "output_only"]
    cache: Eviction
    predicted: bool = False
    """Whether adapters are loaded too that nobody waits for yet, but which the histogram says will be asked for."""
    accuracy: float | None = ACCURACY
    loop: Loop = OUR_LOOP

    def scheduler(self, cache: AdapterCache[int], memory: int, slo_s: float) -> Scheduler[int, int]:
        """For a replica with `memory` bytes, where requests should end within `slo_s` seconds."""
        histogram: ArrivalHistogram[int] | None = ArrivalHistogram() if self.predicted else None
        return Scheduler(_ORDERS[self.order](slo_s), cache, memory, histogram=histogram, loads=LOADS)


class _OutputOnly(QueueClasses):
    """Classes by the predicted answer alone (§5.4)."""

    def observe(self, now: float, prompt: int, output: int, adapter_bytes: int, charge: int) -> None:
        super().observe(now, 0, output, 0, charge + adapter_bytes)

    def ended(self, prompt: int, output: int, adapter_bytes: int, seconds: float) -> None:
        super().ended(0, output, 0, seconds)

    def classify(self, prompt: int, output: int, adapter_bytes: int) -> int:
        return super().classify(0, output, 0)


_ORDERS: dict[str, Callable[[float], Fifo[int, int] | ShortestFirst[int, int] | MultiQueue[int, int]]] = {
    "fifo": lambda slo_s: Fifo(),
    "sjf": lambda slo_s: ShortestFirst(),
    "multi_queue": lambda slo_s: MultiQueue(QueueClasses(slo_s)),
    "output_only": lambda slo_s: MultiQueue(_OutputOnly(slo_s)),
}

S_LORA = System("S-LoRA", "fifo", "none")
SJF = System("SJF with ageing", "sjf", "none")
OURS = System("Chameleon", "multi_queue", "compound")
NO_CACHE = System("no cache", "multi_queue", "none")
NO_SCHEDULER = System("no scheduler", "fifo", "compound")
LRU = System("LRU", "fifo", "lru")
FAIR_SHARE = System("fair share", "fifo", "fair_share")
PREFETCH = replace(OURS, name="predicted prefetch", predicted=True)
OUTPUT_ONLY = replace(OURS, name="OutputOnly", order="output_only")
ONLINE = replace(OURS, name="our predictor", accuracy=None)
PUBLISHED = replace(S_LORA, name="S-LoRA as published", loop=S_LORA_LOOP)
OURS_THERE = replace(OURS, name="Chameleon on S-LoRA's loop", loop=S_LORA_LOOP)
NO_SCHEDULER_THERE = replace(NO_SCHEDULER, name="no scheduler on S-LoRA's loop", loop=S_LORA_LOOP)
