"""The end: what was accepted is answered, and no process is left."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
from support.waiting import HANGS_AFTER_S, PROCESS_HANGS_AFTER_S, wait_until

from e2e.cluster import Cluster, runs

REQUESTS = 4


def test_it_answers_what_it_has_accepted_and_ends_with_all_its_processes(cluster: Cluster) -> None:
    body: dict[str, Any] = {"model": "chat", "prompt": "The last words are", "max_tokens": 400, "ignore_eos": True}
    begun = threading.Semaphore(0)

    def ask(_index: int) -> str:
        """The last line of an answer that has begun before the cluster is told to stop."""
        address, last = f"{cluster.address}/v1/completions", ""
        with httpx.stream("POST", address, json={**body, "stream": True}, timeout=HANGS_AFTER_S) as response:
            for line in response.iter_lines():
                if line and not last:
                    begun.release()
                last = line or last
        return last

    family = psutil.Process(cluster.process.pid).children(recursive=True)
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = pool.map(ask, range(REQUESTS))
        for _ in range(REQUESTS):
            assert begun.acquire(timeout=HANGS_AFTER_S)
        cluster.process.send_signal(signal.SIGTERM)
        assert list(answers) == ["data: [DONE]"] * REQUESTS
    cluster.process.wait(PROCESS_HANGS_AFTER_S)
    wait_until(lambda: not any(map(runs, family)))
