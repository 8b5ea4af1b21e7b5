"""What all systems have in common, and the two baselines of the paper that are about policy alone (Flover §III).

Both take whoever computes as a parameter: transformers, or our own kernels, so that what the policy costs can be told
from what the kernels gain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pliant.bench.llm.outcome import Outcome, Recorder
from pliant.bench.llm.workload import Request, Workload

Batch = Sequence[tuple[int, Request]]
"""Requests and their places in the workload."""
Generate = Callable[[Batch, Recorder], None]
"""Answers a batch of requests and notes their tokens, and nothing of a row that goes on past its request's end."""


class System(Protocol):
    """Answers workloads, one at a time, as often as it is asked."""

    def run(self, workload: Workload) -> Outcome:
        """Every request from its arrival on, to its last token."""


class DynamicBatching:
    """Packs the requests of a time window into one batch, and takes no other before that is done (§III).

    The window opens with the oldest waiting request; a batch of `most` requests goes at once. With `most` 1 that is one
    request after the other, and with a window of 0 a batch is whatever waits.
    """

    def __init__(self, generate: Generate, window_s: float, most: int) -> None:
        self._generate = generate
        self._window_s = window_s
        self._most = most

    def run(self, workload: Workload) -> Outcome:
        recorder = Recorder(threads=1)
        requests = list(enumerate(workload))
        while requests:
            full = requests[self._most - 1][1].at_s if len(requests) >= self._most else float("inf")
            recorder.wait_until(min(requests[0][1].at_s + self._window_s, full))
            now = recorder.now()
            batch = [item for item in requests[: self._most] if item[1].at_s <= now]
            self._generate(batch, recorder)
            requests = requests[len(batch) :]
        return recorder.outcome(workload)


class ConcurrentInstances:
    """A thread for each request, started when it arrives, over shared weights: FasterTransformer's way (§III).

    `generate` is called by many threads at once. Each computes on one thread of its own, which is what serves this
    baseline best: more only contend.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def run(self, workload: Workload) -> Outcome:
        threads_before = torch.get_num_threads()
        recorder = Recorder(threads=len(workload))
        errors: list[BaseException] = []

        def answer(index: int, request: Request) -> None:
            try:
                torch.set_num_threads(1)
                self._generate([(index, request)], recorder)
            except BaseException as error:
                errors.append(error)

        threads = []
        for index, request in enumerate(workload):
            recorder.wait_until(request.at_s)
            threads.append(threading.Thread(target=answer, args=(index, request), name=f"instance-{index}"))
            threads[-1].start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(threads_before)
        if errors:
            raise errors[0]
        return recorder.outcome(workload)
