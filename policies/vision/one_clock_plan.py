"""Algorithms 2 and 3 of OTAS (§III-D) as the paper writes them: what `pareto_plan` is compared with, and never below.

Batches come in the order of their deadlines, with gammas in rising order. Kept as it is: a batch and gamma have one
clock, that of the richest way to get there, so that a faster way is forgotten (the plan is not always the best); and
where a batch adds nothing to any way, S still points to the first gamma, which may then be too slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pliant.policies.vision.token_profile import Floats

BETA = 5
"""Batches up to which Algorithm 3 decides."""
INITIAL_S = 2.0
"""For which Algorithm 3 decides after the start."""
KAPPA = 0.8
"""Mean utility above which a batch gets the greatest gamma (Algorithm 3)."""


def algorithm_2(now: float, latency_s: Floats, utility: Floats, due: Sequence[float]) -> list[int | None]:
    """Lines 5 to 38: the index of a gamma for each batch, None where it does not run.

    `latency_s` and `utility` are [batch, gamma]; a gamma that a batch cannot have has an infinite latency.
    """
    batches, gammas = latency_s.shape
    times, gains = latency_s.tolist(), utility.tolist()
    dp = [[0.0] * (gammas + 1) for _ in range(batches + 1)]
    chosen = [[1] * (gammas + 1) for _ in range(batches + 1)]
    clock = [[now] * (gammas + 1) for _ in range(batches + 1)]
    for b in range(1, batches + 1):
        for l_b in range(gammas + 1):
            feasible = False
            for before in range(gammas + 1):
                if dp[b - 1][before] == -math.inf:
                    continue
                if l_b == 0:
                    if dp[b - 1][before] > dp[b][l_b]:
                        dp[b][l_b] = dp[b - 1][before]
                        chosen[b][l_b] = before
                        clock[b][l_b] = clock[b - 1][before]
                elif (end := clock[b - 1][before] + times[b - 1][l_b - 1]) < due[b - 1]:
                    feasible = True
                    if (total := dp[b - 1][before] + gains[b - 1][l_b - 1]) > dp[b][l_b]:
                        dp[b][l_b] = total
                        chosen[b][l_b] = before
                        clock[b][l_b] = end
            if l_b > 0 and not feasible:
                dp[b][l_b] = -math.inf
                clock[b][l_b] = math.inf
    choice = int(np.argmax(dp[batches]))
    plan = [choice]
    for b in range(batches, 1, -1):
        choice = chosen[b][choice]
        plan.append(choice)
    return [choice - 1 if choice else None for choice in reversed(plan)]


def algorithm_3(
    now: float,
    latency_s: Floats,
    mean_utility: Sequence[float],
    due: Sequence[float],
    usual: int,
    kappa: float = KAPPA,
) -> list[int | None]:
    """The index of a gamma for each batch: the least where it is late, the greatest where it earns much, else `usual`.

    `usual` is that of f(q), `latency_s` [batch, gamma]; of gammas that a batch cannot have, the next lower one counts.
    """
    plan: list[int | None] = []
    for times, mean, deadline in zip(latency_s.tolist(), mean_utility, due, strict=True):
        possible = [choice for choice, seconds in enumerate(times) if seconds < math.inf]
        if not possible:
            plan.append(None)
            continue
        choice = max((lower for lower in possible if lower <= usual), default=possible[0])
        if now + times[choice] >= deadline:
            choice = possible[0]
        elif mean > kappa:
            choice = possible[-1]
        plan.append(choice)
        now += times[choice]
    return plan
