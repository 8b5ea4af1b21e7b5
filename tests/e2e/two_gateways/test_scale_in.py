"""Fewer replicas while clients ask: nothing is lost, and no text waits for who can read it."""

from __future__ import annotations

from pathlib import Path

import httpx
from support.waiting import wait_until

from e2e.cluster import Cluster
from e2e.load import Load
from e2e.pretend_nodes import LENGTHS, LONG, SHORT
from e2e.scaled import SLEEPING


def ask(http: httpx.Client, number: int) -> str:
    response = http.post(f"/models/{SLEEPING}", json={"inputs": LONG if number % 3 == 0 else SHORT})
    return "ok" if response.status_code == 200 else f"{response.status_code} {response.text}"


def held(cluster: Cluster) -> list[int]:
    return sorted(report["max_length"] for report in cluster.stats(SLEEPING).values())


def await_held(cluster: Cluster, lengths: list[int]) -> None:
    """Whichever gateway says what replicas hold."""
    wait_until(lambda: all(held(cluster) == lengths for _ in range(8)), cluster.progress)


def test_long_texts_have_a_replica_at_every_moment(cluster: Cluster, told: Path) -> None:
    await_held(cluster, [LENGTHS[-1]] * 3)
    load = Load(cluster.address, 3, ask)
    with load.running():
        wait_until(lambda: len(held(cluster)) == 3 and {LENGTHS[0], LENGTHS[-1]} <= {*held(cluster)}, cluster.progress)
        told.write_text("1")
        seen = [held(cluster)]

        def alone() -> bool:
            seen.append(held(cluster))
            return len(seen[-1]) == 1

        wait_until(alone, cluster.progress)
        load.go_on()
        await_held(cluster, [LENGTHS[-1]])
        seen.append(held(cluster))
    assert all(LENGTHS[-1] in lengths for lengths in seen), seen
    assert seen[-1] == [LENGTHS[-1]]
    assert set(load.outcomes) == {"ok"}, load.outcomes
