"""Where replicas fit: gangs on one node, shares of one GPU, CPUs; and the split that gains the most of what fits.

Nodes that are alike are interchangeable, and so are replicas of one shape. So the integer program knows of neither: it
says how many nodes hold which *pattern*, a number of replicas of each shape that fits on one node and that nothing can
be added to. Services of one shape that depend on no choice are put together before: their best gain by their number of
replicas is a max-plus convolution. What remains is small, whatever the number of nodes and services.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from pliant.policies.cluster.budget import BudgetError, Group, Nodes, Shape, Split, alone, gain_of, units
from pliant.policies.cluster.gain_table import GainTable

_GAP, _GAP_OF_MANY = 1e-4, 9e-4
"""Of the gain: the solver is content with a split that is proven to be so close to the best."""
_LIMIT_MS = 2_000
_MANY = 500
_NEAR = 6
"""Replicas of a block beside the relaxation's optimum."""
_MOST_WAYS = 500_000
_ROUNDING = 1e-9
_NO_ROOM = "the least replicas of all services, and the reserve, have no room on the nodes"
_NONE_FOUND = "no place was found in time for the least replicas of all services and the reserve; there may be one"


class UnsolvedError(Exception):
    """The solver's time was over before it had found anything: the processor is busy with something else."""


@dataclass
class Node:
    """What is left of one."""

    gpus: int
    cpus: float
    shared: list[int]
    """What is left of each GPU that is shared, in parts."""


def first_fit(wanted: Sequence[tuple[Shape, int]], nodes: Sequence[Nodes]) -> bool:
    """Whether replicas, largest first, each on the fullest node that takes it, all find a place.

    If not, they may fit nevertheless.
    """
    free = [Node(kind.gpus, kind.cpus, []) for kind in nodes for _ in range(kind.count)]
    parts = units([shape for shape, _ in wanted])
    for shape, count in sorted(wanted, key=lambda each: each[0], reverse=True):
        taken = int(shape.share * parts)
        for _ in range(count):
            if not place(taken, shape.cpus, parts, free):
                return False
    return True


def place(taken: int, cpus: float, parts: int, nodes: Sequence[Node]) -> bool:
    """Put one replica, which takes so many parts of a GPU, of which each has `parts`, on the fullest node that has room
    for it; whether there is one."""
    gpus, share = divmod(taken, parts)
    best: tuple[float, Node, int | None] | None = None
    for node in nodes:
        if node.cpus + _ROUNDING < cpus:
            continue
        opened = next((at for at, left in enumerate(node.shared) if left >= share), None) if share else None
        if opened is None and node.gpus < (1 if share else gpus):
            continue
        rank = node.gpus + node.cpus / 1e6 - (1e3 if opened is not None else 0)
        if best is None or rank < best[0]:
            best = rank, node, opened
    if best is None:
        return False
    _, node, opened = best
    node.cpus -= cpus
    if not share:
        node.gpus -= gpus
    elif opened is not None:
        node.shared[opened] -= share
    else:
        node.gpus -= 1
        node.shared.append(parts - share)
    return True


@cache
def patterns(gpus: int, cpus: float, shapes: tuple[Shape, ...]) -> tuple[tuple[int, ...], ...]:
    """How many replicas of each shape one node can hold together: all maximal ways.

    Shapes rarely change between two plans, so what was found is kept. Raises ValueError for too many ways.
    """
    left = {(0,) * len(shapes): gpus}
    """By what is held: the most GPUs that nothing is on, whatever way shares are put on the others."""
    for held in _pieces(shapes):
        taken = sum(int(shape.share) * count for shape, count in zip(shapes, held, strict=True)) or int(
            any(shape.share for shape, count in zip(shapes, held, strict=True) if count)
        )
        reached = [*left]
        while reached:
            following = []
            for before in reached:
                after = tuple(map(sum, zip(before, held, strict=True)))
                used = sum(shape.cpus * count for shape, count in zip(shapes, after, strict=True))
                if left[before] - taken > left.get(after, -1) and used <= cpus + _ROUNDING:
                    left[after] = left[before] - taken
                    following.append(after)
            if len(left) > _MOST_WAYS:
                raise ValueError(f"{len(shapes)} shapes of replicas fit on a node in more than {_MOST_WAYS} ways")
            reached = following
    return tuple(sorted(held for held in left if not any(more in left for more in _one_more(held))))


def _one_more(held: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return ((*held[:at], held[at] + 1, *held[at + 1 :]) for at in range(len(held)))


def _pieces(shapes: Sequence[Shape]) -> Iterator[tuple[int, ...]]:
    """What a node is filled with: one replica, or all the replicas that share one GPU."""
    shared = [at for at, shape in enumerate(shapes) if 0 < shape.share < 1]
    for at in range(len(shapes)):
        if at not in shared:
            yield tuple(int(each == at) for each in range(len(shapes)))
    for counts in product(*(range(int(1 / shapes[at].share) + 1) for at in shared)):
        if any(counts) and sum(count * shapes[at].share for at, count in zip(shared, counts, strict=True)) <= 1:
            by_shape = dict(zip(shared, counts, strict=True))
            yield tuple(by_shape.get(at, 0) for at in range(len(shapes)))


class _Block(NamedTuple):
    """Groups of claims of one shape, whose replicas the program counts together."""

    shape: Shape
    table: GainTable
    needs: tuple[int, int] | None
    """The group and the alternative without which it does not count; None: no choice touches it."""
    members: list[int]
    """Which groups these are, where no choice touches them."""

    @property
    def options(self) -> list[int]:
        """The numbers of replicas that gain more than fewer would."""
        best = self.table.best
        rising: list[int] = np.flatnonzero(best > np.concatenate(([-np.inf], best[:-1]))).tolist()
        return rising


def _blocks(groups: Sequence[Group], room: Mapping[Shape, int]) -> list[_Block]:
    blocks = []
    for shape, most in room.items():
        members = [at for at, group in enumerate(groups) if not _spans(group) and group.claims[0].shape == shape]
        if members:
            table = GainTable([groups[at] for at in members], most, _one)
            blocks.append(_Block(shape, table, None, members))
    for at, group in enumerate(groups):
        if _spans(group):
            for alternative, gains in enumerate(group.alternatives):
                for claim, gain in zip(group.claims, gains, strict=True):
                    table = GainTable([alone(claim, gain)], room[claim.shape], _one)
                    blocks.append(_Block(claim.shape, table, (at, alternative), []))
    return blocks


def _one(shape: Shape) -> int:
    return 1


def _spans(group: Group) -> bool:
    """Whether its claims have several shapes, so that its choice must be made within the integer program."""
    return len({claim.shape for claim in group.claims}) > 1


def split_on(groups: Sequence[Group], nodes: Sequence[Nodes], reserve: int, bound: float) -> Split:
    """The split of the greatest gain that can be placed; `bound` is known of it already.

    Raises UnsolvedError where the solver finds none in time.

    Where blocks have many numbers of replicas to choose from, those near the optimum of the linear relaxation are left,
    and the relaxation's optimum is the bound. Raises BudgetError where the least replicas and the reserve have no room.
    """
    every = {claim.shape for group in groups for claim in group.claims}
    shapes = tuple(sorted(every | ({Shape(1)} if reserve else set())))
    ways = [(kind, held) for kind in nodes if kind.count for held in patterns(kind.gpus, kind.cpus, shapes)]
    room = {
        shape: sum(kind.count * max((held[at] for other, held in ways if other is kind), default=0) for kind in nodes)
        for at, shape in enumerate(shapes)
    }
    blocks = _blocks(groups, room)
    options = [block.options for block in blocks]
    if not all(options):
        raise BudgetError(_NO_ROOM)
    if sum(map(len, options)) > _MANY:
        relaxed = _Program(blocks, options, ways, shapes, reserve, whole=False)
        bound = min(bound, relaxed.solve())
        near = [
            [count for count in each if abs(count - middle) <= _NEAR] or each
            for each, middle in zip(options, relaxed.replicas(), strict=True)
        ]
        options = [sorted({each[0], *few}) for each, few in zip(options, near, strict=True)]
    program = _Program(blocks, options, ways, shapes, reserve, whole=True)
    found = program.solve()
    if sum(map(len, options)) == sum(len(block.options) for block in blocks):
        bound = min(bound, found)
    choices = [0] * len(groups)
    for (at, alternative), each in program.chosen.items():
        if each.solution_value() > 0.5:
            choices[at] = alternative
    replicas: dict[str, int] = {}
    for block, count in zip(blocks, program.replicas(), strict=True):
        if block.needs and choices[block.needs[0]] != block.needs[1]:
            continue
        counts, made = block.table.split(round(count))
        replicas |= counts
        for at, choice in zip(block.members, made, strict=False):
            choices[at] = choice
    ordered = {claim.name: replicas[claim.name] for group in groups for claim in group.claims}
    gain = gain_of(groups, ordered, choices)
    return Split(ordered, tuple(choices), gain, max(gain, bound))


def thinned(groups: Sequence[Group], nodes: Sequence[Nodes], reserve: int, relaxed: Split) -> Split:
    """`relaxed`, less so many replicas that a first fit places the others: first those that earn the least for what
    they take of all GPUs and CPUs.

    Raises BudgetError where it does not even place the least replicas and the reserve.
    """
    claims = {claim.name: claim for group in groups for claim in group.claims}
    gpus = max(1, sum(kind.count * kind.gpus for kind in nodes))
    cpus = max(1.0, sum(kind.count * kind.cpus for kind in nodes))
    dispensable: list[tuple[float, str]] = []
    for group, choice in zip(groups, relaxed.choices, strict=True):
        for claim, curve in zip(group.claims, group.alternatives[choice], strict=True):
            net, dearest = claim.net(curve), -np.inf
            size = claim.shape.gpus / gpus + claim.shape.cpus / cpus
            for count in range(relaxed.replicas[claim.name], claim.least, -1):
                dearest = max(dearest, float(net[count] - net[count - 1]) / size)
                dispensable.append((dearest, claim.name))  # never before one of its own that goes before it
    dispensable.sort(key=lambda each: each[0])

    def without(gone: int) -> dict[str, int]:
        less = Counter(name for _, name in dispensable[:gone])
        return {name: count - less[name] for name, count in relaxed.replicas.items()}

    def fits(gone: int) -> bool:
        wanted = [(claims[name].shape, count) for name, count in without(gone).items()]
        return first_fit([*wanted, (Shape(1), reserve)], nodes)

    gone = bisect_left(range(len(dispensable) + 1), True, key=fits)
    if gone > len(dispensable):
        raise BudgetError(_NONE_FOUND)
    replicas = without(gone)
    gain = gain_of(groups, replicas, relaxed.choices)
    return Split(replicas, relaxed.choices, gain, max(gain, relaxed.bound))


class _Program:
    """The integer program, or its linear relaxation."""

    def __init__(
        self,
        blocks: Sequence[_Block],
        options: Sequence[Sequence[int]],
        ways: Sequence[tuple[Nodes, tuple[int, ...]]],
        shapes: Sequence[Shape],
        reserve: int,
        whole: bool,
    ) -> None:
        self._whole = whole
        self._many = sum(map(len, options)) > _MANY // 10
        self._solver = solver = pywraplp.Solver.CreateSolver("SCIP" if whole else "GLOP")
        binary = solver.BoolVar if whole else lambda name: solver.NumVar(0, 1, name)
        self.chosen = {block.needs: binary("") for block in blocks if block.needs}
        """By group and alternative, where a choice is made here."""
        for at in {at for at, _ in self.chosen}:
            solver.Add(solver.Sum([each for (other, _), each in self.chosen.items() if other == at]) == 1)
        self._picks = [{count: binary("") for count in counts} for counts in options]
        taken: dict[Shape, list[Any]] = {shape: [] for shape in shapes}
        gains: list[Any] = []
        for block, picks in zip(blocks, self._picks, strict=True):
            solver.Add(solver.Sum(list(picks.values())) == (self.chosen[block.needs] if block.needs else 1))
            taken[block.shape] += [count * each for count, each in picks.items() if count]
            gains += [float(block.table.best[count]) * each for count, each in picks.items()]
        number = solver.IntVar if whole else solver.NumVar
        held = [(kind, pattern, number(0, kind.count, "")) for kind, pattern in ways]
        for kind in {id(kind): kind for kind, _ in ways}.values():
            solver.Add(solver.Sum([each for other, _, each in held if other is kind]) <= kind.count)
        for at, shape in enumerate(shapes):
            places = solver.Sum([pattern[at] * each for _, pattern, each in held if pattern[at]])
            solver.Add(solver.Sum(taken[shape]) + (reserve if shape == Shape(1) else 0) <= places)
        solver.Maximize(solver.Sum(gains))

    def solve(self) -> float:
        """The bound of its optimum. Raises BudgetError where there is none, UnsolvedError where the time is over."""
        parameters = pywraplp.MPSolverParameters()
        parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, _GAP_OF_MANY if self._many else _GAP)
        self._solver.SetTimeLimit(_LIMIT_MS)
        status = self._solver.Solve(parameters)
        if status == pywraplp.Solver.INFEASIBLE:
            raise BudgetError(_NO_ROOM)
        if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
            raise UnsolvedError
        objective = self._solver.Objective()
        return float(max(objective.BestBound() if self._whole else objective.Value(), objective.Value()))

    def replicas(self) -> list[float]:
        """Of each block."""
        return [sum(count * each.solution_value() for count, each in picks.items()) for picks in self._picks]
