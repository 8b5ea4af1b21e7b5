"""The best that anybody could earn who knows all arrivals: exactly for a few queries, and a bound for whole traces.

For a few, OR-tools finds which queries run together, when, and at which gamma, of all schedules that there are. For a
trace, queries are a fluid that every gamma takes at its greatest throughput, in any order, so that no real replica can
earn more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]
from ortools.sat.python import cp_model

from pliant.bench.vision.profiles import Profile
from pliant.simulation.vision.outcome import Query

_MICRO = 1_000_000
_BIN_S = 0.1
"""Of a trace: a query may be computed from the bin on in which it comes, and until the end of that of its deadline."""


def exactly(profile: Profile, queries: Sequence[Query], most_rows: int, limit_s: float) -> tuple[float, float]:
    """Utility times accuracy that the best schedule found earns, and that no schedule exceeds; equal if it is proven.

    Batches have up to `most_rows` rows. The search ends after `limit_s`, on one core.
    """
    model = cp_model.CpModel()
    horizon = round(max(query.deadline for query in queries) * _MICRO)
    sizes = range(1, min(most_rows, len(queries)) + 1)
    ready = model.NewConstant(0)
    earned = []
    joined: list[list[cp_model.IntVar]] = [[] for _ in queries]
    used_before: cp_model.IntVar | None = None
    for slot in range(len(queries)):
        shapes = {
            (gamma, rows): model.NewBoolVar(f"slot {slot} {gamma} {rows}") for gamma in profile.gammas for rows in sizes
        }
        used = model.NewBoolVar(f"used {slot}")
        model.Add(sum(shapes.values()) == used)
        if used_before is not None:
            model.AddImplication(used, used_before)
        used_before = used
        start = model.NewIntVar(0, horizon, f"start {slot}")
        end = model.NewIntVar(0, 2 * horizon, f"end {slot}")
        model.Add(start >= ready)
        seconds = sum(round(profile.latency(gamma, rows) * _MICRO) * chosen for (gamma, rows), chosen in shapes.items())
        model.Add(end == start + seconds)
        members = []
        for place, query in enumerate(queries):
            answers = [model.NewBoolVar(f"{place} in {slot} with {gamma}") for gamma in profile.gammas]
            member = model.NewBoolVar(f"{place} in {slot}")
            model.Add(sum(answers) == member)
            for gamma, answer in zip(profile.gammas, answers, strict=True):
                model.Add(answer <= sum(shapes[gamma, rows] for rows in sizes))
                gain = query.utility * (profile.accuracy(query.task, gamma) or 0.0)
                earned.append(round(gain * _MICRO) * answer)
            model.Add(start >= int(np.ceil(query.arrival * _MICRO))).OnlyEnforceIf(member)
            model.Add(end <= int(query.deadline * _MICRO)).OnlyEnforceIf(member)
            joined[place].append(member)
            members.append(member)
        model.Add(sum(members) == sum(rows * chosen for (_, rows), chosen in shapes.items()))
        ready = end
    for slots in joined:
        model.Add(sum(slots) <= 1)
    model.Maximize(sum(earned))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    solver.Solve(model)
    return solver.ObjectiveValue() / _MICRO, solver.BestObjectiveBound() / _MICRO


def at_most(profile: Profile, queries: Sequence[Query]) -> float:
    """Utility times accuracy that no replica earns with these queries, whatever it knows.

    A linear program: for the queries of a bin and kind, how many get which gamma, and in which bins.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    bins = int(max(query.deadline for query in queries) / _BIN_S) + 1
    busy = [solver.Constraint(-solver.infinity(), _BIN_S) for _ in range(bins)]
    goal = solver.Objective()
    goal.SetMaximization()
    work: dict[tuple[int, int], pywraplp.Constraint] = {}
    for (first, last, task, utility), number in _alike(queries).items():
        if (first, last) not in work:
            work[first, last] = solver.Constraint(-solver.infinity(), 0)
            for place in range(first, last + 1):
                share = solver.NumVar(0, _BIN_S, "")
                busy[place].SetCoefficient(share, 1)
                work[first, last].SetCoefficient(share, -1)
        answered = solver.Constraint(0, number)
        for gamma in profile.gammas:
            accuracy = profile.accuracy(task, gamma)
            if accuracy is None:
                continue
            some = solver.NumVar(0, number, "")
            answered.SetCoefficient(some, 1)
            work[first, last].SetCoefficient(some, 1 / profile.per_s(gamma))
            goal.SetCoefficient(some, utility * accuracy)
    solver.Solve()
    return float(goal.Value())


def _alike(queries: Sequence[Query]) -> dict[tuple[int, int, str, float], int]:
    """How many have the same bins of arrival and deadline, task and utility."""
    numbers: dict[tuple[int, int, str, float], int] = {}
    for query in queries:
        kind = (int(query.arrival / _BIN_S), int(query.deadline / _BIN_S), query.task, query.utility)
        numbers[kind] = numbers.get(kind, 0) + 1
    return numbers
