"""The end: what was accepted is answered, and no process is left."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
from e2e.cluster import Cluster, runs
from support.waiting import HANGS_AFTER_S, PROCESS_HANGS_AFTER_S, wait_until

REQUESTS = 4


def test_it_answers_what_it_has_accepted_and_ends_with_all_its_processes(cluster: Cluster) -> None:
    body: dict[str, Any] = {"model": "chat", "prompt": "The last words are", "max_tokens": 200, "ignore_eos": True}

    def ask(_index: int) -> int:
        return httpx.post(f"{cluster.address}/v1/completions", json=body, timeout=HANGS_AFTER_S).status_code

    def answering() -> bool:
        return any(report["outstanding"] for report in cluster.stats("chat").values())

    family = psutil.Process(cluster.process.pid).children(recursive=True)
    with ThreadPoolExecutor(REQUESTS) as pool:
        statuses = pool.map(ask, range(REQUESTS))
        wait_until(answering, cluster.progress)
        cluster.process.send_signal(signal.SIGTERM)
        assert list(statuses) == [200] * REQUESTS
    cluster.process.wait(PROCESS_HANGS_AFTER_S)
    wait_until(lambda: not any(map(runs, family)))
