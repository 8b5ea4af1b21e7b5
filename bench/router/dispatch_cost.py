"""How many requests a second one thread can dispatch with Arlo's Algorithm 1 (§3.4), without a cluster."""

from __future__ import annotations

import random
import time
from collections import deque

from pliant.policies.encoder.dispatch import Dispatcher

LEVELS = 12
_LONGEST = 512
_SLO_S = 0.15
_LOAD = 0.6
"""Share of the pool's capacity that is outstanding."""
_BUDGET_S = 0.15


def dispatches_per_second(replicas: int, requests: int, seed: int) -> float:
    """Dispatches, each with a completion, per second of thread CPU time, over `replicas` in each of 12 levels.

    Lengths are log-normal (median 100 tokens); requests complete in random order, and as many as at the start stay
    outstanding.
    """
    rng = random.Random(seed)
    dispatcher: Dispatcher[str] = Dispatcher(_SLO_S)
    capacity = 0
    for level in range(LEVELS):
        max_length = _LONGEST * (level + 1) // LEVELS
        service_s = 0.6e-3 + 4.3e-3 * max_length / _LONGEST
        capacity += replicas * int(_SLO_S / service_s)
        for replica in range(replicas):
            dispatcher.assign(f"{level}-{replica}", max_length, service_s)
    lengths = [min(_LONGEST, max(4, int(rng.lognormvariate(4.6, 0.9)))) for _ in range(requests)]
    outstanding = [dispatcher.dispatch(rng.choice(lengths)) for _ in range(int(_LOAD * capacity))]
    rng.shuffle(outstanding)
    queue = deque(outstanding)

    dispatch, complete, push, pop = dispatcher.dispatch, dispatcher.complete, queue.append, queue.popleft
    started = time.thread_time()
    for length in lengths:
        push(dispatch(length, _BUDGET_S))
        complete(pop())
    return requests / (time.thread_time() - started)
