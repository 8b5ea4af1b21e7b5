"""Small questions about the policy itself: how long it thinks, and how far it stays below what could be known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pliant.bench.findings import Findings
from pliant.bench.report import Figure
from pliant.bench.vision import optimum
from pliant.bench.vision.profiles import MOST_ROWS, Profile
from pliant.bench.vision.workload import KINDS, Trace
from pliant.policies.vision.slo_batching import Batch
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import ExactPolicy
from pliant.simulation.vision.outcome import Query
from pliant.simulation.vision.simulator import Simulation

_DUE_WITHIN_S = (0.5, 1.0, 3.0)
"""Spans over which the deadlines of queued batches are spread: tight, as table II has them, and wide."""
_TARGETS = {16: "<= 5", 64: "<= 20"}
_HEARD = 300
"""Queries that came before, from which the price of time is learned."""

_QUERIES = 7
_STANDS_FOR = 10
"""Images that each query of a small instance stands for, so that it is batched as many are."""
_MOST_ROWS = MOST_ROWS // _STANDS_FOR
_SLOWER = 6.0
"""And so much slower is the device, so that few queries keep it busy."""
_LOADS = (1.0, 2.0, 3.0)


def decision_ms(profile: Profile, repetitions: int) -> Findings:
    """P99 of a decision's processor time, over queues of 16 and 64 batches of all sizes and deadlines.

    With the price of time that follows from those who wait, and without one, when more plans are worth a look.
    """
    found = Findings()
    for batches, target in _TARGETS.items():
        cases = {
            f"due within {within_s:g} s{'' if priced else ', no price'}": (within_s, priced)
            for priced in (True, False)
            for within_s in _DUE_WITHIN_S
        }
        p99_ms = {
            case: float(np.quantile([_decided_ms(profile, batches, *of, seed) for seed in range(repetitions)], 0.99))
            for case, of in cases.items()
        }
        name = "decision_ms_p99" if batches == min(_TARGETS) else f"decision_ms_p99_{batches}"
        beside = ", ".join(f"{value:.1f} ms {case}" for case, value in p99_ms.items())
        values = p99_ms.values()
        found.figures.append(Figure(name, max(values), min(values), max(values), target, beside))
    return found


def fraction_of_offline_optimum(profile: Profile, instances: int, limit_s: float) -> Findings:
    """What ours earns, over what the best schedule with full knowledge of arrivals does, on small instances.

    Where OR-tools does not end in time, the least upper bound that it has proven counts.
    """
    small = _small(profile)
    fractions, myopic = [], []
    proven = 0
    for seed in range(instances):
        load = _LOADS[seed % len(_LOADS)]
        queries = Trace((load,) * _QUERIES, seed).queries(small.per_s(), small.roles)[:_QUERIES]
        found, bound = optimum.exactly(small, queries, _MOST_ROWS, limit_s)
        proven += bound <= found * (1 + 1e-6)
        fractions.append(_expected(small, queries, priced=True) / bound)
        myopic.append(_expected(small, queries, priced=False) / bound)
    beside = (
        f"{instances} instances of {_QUERIES} queries, {proven} solved to the end; without a price of time, "
        f"as if nobody came later, which here is so, {np.mean(myopic):.3f}"
    )
    mean = float(np.mean(fractions))
    return Findings([Figure("fraction_of_offline_optimum", mean, min(fractions), max(fractions), beside=beside)])


def _decided_ms(profile: Profile, batches: int, within_s: float, priced: bool, seed: int) -> float:
    tokens = profile.tokens()
    price = TimePrice(tokens)
    policy: ExactPolicy[Query] = ExactPolicy(tokens, price if priced else None)
    rng = np.random.default_rng(seed)
    for index in range(_HEARD):
        policy.arrived(_query(profile, rng, index, (index - _HEARD) / profile.per_s()))
    queue = _queue(profile, rng, batches, within_s)
    started = time.process_time()
    policy.plan(queue, 0.0)
    return (time.process_time() - started) * 1e3


def _queue(profile: Profile, rng: np.random.Generator, batches: int, within_s: float) -> list[Batch[Query]]:
    queue = []
    for _ in range(batches):
        due = rng.uniform(0.05, 1.0) * within_s
        members = [
            replace(_query(profile, rng, index, 0.0), deadline=due + rng.uniform(0, 0.2))
            for index in range(int(rng.integers(1, MOST_ROWS + 1)))
        ]
        batch = Batch(members[0])
        for member in members[1:]:
            batch.add(member)
        queue.append(batch)
    return queue


def _query(profile: Profile, rng: np.random.Generator, index: int, at: float) -> Query:
    kind = KINDS[rng.integers(len(KINDS))]
    return Query(index, at, at + kind.latency_s, kind.utility, profile.roles[kind.role], 0.0)


def _small(profile: Profile) -> Profile:
    """The same device for queries that stand for many."""
    seconds = tuple(
        tuple(_SLOWER * curve[min(MOST_ROWS, rows * _STANDS_FOR) - 1] for rows in range(1, MOST_ROWS + 1))
        for curve in profile.seconds
    )
    return replace(profile, seconds=seconds)


def _expected(profile: Profile, queries: Sequence[Query], priced: bool) -> float:
    tokens = profile.tokens(most_rows=_MOST_ROWS)
    policy: ExactPolicy[Query] = ExactPolicy(tokens, TimePrice(tokens) if priced else None)
    return Simulation(tokens, policy, profile.accuracy, noise=0.0).run(queries).expected
