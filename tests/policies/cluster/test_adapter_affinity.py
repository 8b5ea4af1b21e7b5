"""Adapter affinity: one replica for each adapter at low load, more for a hot one, bounded load, and stable homes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.adapter_affinity import AHEAD, SLACK, bound, preferred
from pliant.policies.cluster.live_tokens import LiveTokens

REPLICAS = tuple(f"replica-{index}" for index in range(8))
ADAPTERS = tuple(f"adapter-{index}" for index in range(400))
TOKENS = st.integers(1, 4096)


def homes(*replicas: str) -> dict[str, str]:
    return {adapter: preferred(adapter, 1, dict.fromkeys(replicas, 0)) for adapter in ADAPTERS}


def table(replicas: int) -> LiveTokens[str]:
    made: LiveTokens[str] = LiveTokens()
    for name in REPLICAS[:replicas]:
        made.report(name, 0)
    return made


def test_at_low_load_an_adapter_keeps_its_replica() -> None:
    tokens = table(8)
    for adapter in ADAPTERS:
        chosen = set()
        for _ in range(10):
            chosen.add(tokens.choose(100, adapter=adapter))
            tokens.release(max(chosen), 100)
        together = {tokens.choose(100, adapter=adapter) for _ in range(AHEAD)}
        assert together == chosen, "a few at a time are no reason to load it twice"
        for _ in range(AHEAD):
            tokens.release(max(chosen), 100)


def test_adapters_are_shared_out() -> None:
    counts = Counter(homes(*REPLICAS).values())
    assert set(counts) == set(REPLICAS)
    assert max(counts.values()) < 1.5 * len(ADAPTERS) / len(REPLICAS)


def test_a_hot_adapter_spreads_to_as_few_replicas_as_can_bear_it() -> None:
    tokens = table(8)
    used = Counter(tokens.choose(100, adapter="hot") for _ in range(AHEAD + 1))
    assert len(used) == 2
    home = used.most_common()[0][0]
    for _ in range(200):
        tokens.choose(100)
    assert tokens.choose(100, adapter="hot") == home, "the others have more to do now, too"


@given(st.lists(st.tuples(st.sampled_from((None, *ADAPTERS[:5])), TOKENS), min_size=1, max_size=100), st.integers(1, 8))
def test_the_load_stays_within_the_bound(requests: list[tuple[str | None, int]], replicas: int) -> None:
    tokens = table(replicas)
    for adapter, size in requests:
        before = {name: tokens.live(name) for name in REPLICAS[:replicas]}
        chosen = tokens.choose(size, adapter=adapter)
        assert tokens.live(chosen) <= bound(size, before)
    loads = [tokens.live(name) for name in REPLICAS[:replicas]]
    largest = max(size for _, size in requests)
    assert max(loads) <= (1 + SLACK) * sum(loads) / replicas + AHEAD * largest


@given(st.sets(st.sampled_from(REPLICAS), min_size=2), st.data())
def test_only_the_adapters_of_a_replica_that_leaves_move(replicas: set[str], data: st.DataObject) -> None:
    leaves = data.draw(st.sampled_from(sorted(replicas)))
    before, after = homes(*replicas), homes(*(replicas - {leaves}))
    assert all(after[adapter] == home for adapter, home in before.items() if home != leaves)
    assert leaves not in after.values()


def test_few_adapters_move_to_a_replica_that_comes() -> None:
    before, after = homes(*REPLICAS[:-1]), homes(*REPLICAS)
    moved = {adapter for adapter in ADAPTERS if before[adapter] != after[adapter]}
    assert {after[adapter] for adapter in moved} == {REPLICAS[-1]}
    assert len(moved) < 2 * len(ADAPTERS) / len(REPLICAS)


def test_a_replica_to_avoid_hands_over_to_the_next_in_the_adapter_s_order() -> None:
    tokens = table(8)
    first = tokens.choose(10, adapter="a")
    second = tokens.choose(10, avoid={first}, adapter="a")
    assert second == preferred("a", 1, dict.fromkeys(set(REPLICAS) - {first}, 0))


def test_all_processes_agree() -> None:
    script = (
        "from pliant.policies.cluster.adapter_affinity import preferred\n"
        f"print(*(preferred(a, 1, dict.fromkeys({REPLICAS!r}, 0)) for a in {ADAPTERS[:20]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [homes(*REPLICAS)[adapter] for adapter in ADAPTERS[:20]]
