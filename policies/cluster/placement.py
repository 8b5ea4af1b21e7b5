"""Where replicas fit: gangs on one node, shares of one GPU, CPUs; and the split that gains the most of what fits.

Nodes that are alike are interchangeable, and so are replicas of one shape. So the integer program knows of neither: it
says how many nodes hold which *pattern*, a number of replicas of each shape that fits on one node and that nothing can
be added to. Services of one shape that depend on no choice are put together before: their best gain by their number of
replicas is a max-plus convolution. What remains is small, whatever the number of nodes and services.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from pliant.policies.cluster.budget import BudgetError, Group, Nodes, Shape, Split, alone, gain_of
from pliant.policies.cluster.gain_table import GainTable

_GAP = 1e-4
"""Of the gain: the solver is content with a split that is proven to be so close to the best."""
_LIMIT_MS = 5_000
_MOST_PATTERNS = 20_000
_ROUNDING = 1e-9
_NO_ROOM = "the least replicas of all services, and the reserve, have no room on the nodes"


@dataclass
class _Node:
    gpus: int
    cpus: float
    shared: list[Fraction]
    """What is left of each GPU that is shared."""


def first_fit(wanted: Sequence[tuple[Shape, int]], nodes: Sequence[Nodes]) -> bool:
    """Whether replicas, largest first, each on the fullest node that takes it, all find a place.

    If not, they may fit nevertheless.
    """
    free = [_Node(kind.gpus, kind.cpus, []) for kind in nodes for _ in range(kind.count)]
    for shape, count in sorted(wanted, key=lambda each: each[0], reverse=True):
        for _ in range(count):
            if not _place(shape, free):
                return False
    return True


def _place(shape: Shape, nodes: list[_Node]) -> bool:
    share = shape.share
    whole = share.denominator == 1
    best: tuple[float, _Node, int | None] | None = None
    for node in nodes:
        if node.cpus + _ROUNDING < shape.cpus:
            continue
        opened = None if whole else next((at for at, left in enumerate(node.shared) if left >= share), None)
        if opened is None and node.gpus < (share if whole else 1):
            continue
        rank = node.gpus + node.cpus / 1e6 - (1e3 if opened is not None else 0)
        if best is None or rank < best[0]:
            best = rank, node, opened
    if best is None:
        return False
    _, node, opened = best
    node.cpus -= shape.cpus
    if whole:
        node.gpus -= int(share)
    elif opened is not None:
        node.shared[opened] -= share
    else:
        node.gpus -= 1
        node.shared.append(1 - share)
    return True


def patterns(node: Nodes, shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
    """How many replicas of each shape one node can hold together: all maximal ways. Raises ValueError for too many."""
    found: set[tuple[int, ...]] = set()
    order = sorted(range(len(shapes)), key=lambda at: shapes[at], reverse=True)
    for counts in _packings(_Node(node.gpus, node.cpus, []), [shapes[at] for at in order]):
        found.add(tuple(counts[order.index(at)] for at in range(len(shapes))))
        if len(found) > _MOST_PATTERNS:
            raise ValueError(f"{len(shapes)} shapes of replicas fit on a node in more than {_MOST_PATTERNS} ways")
    return _maximal(found)


def _packings(node: _Node, shapes: Sequence[Shape]) -> Iterator[tuple[int, ...]]:
    """Ways to fill a node, the first shape first; of the last one as many as fit."""
    if not shapes:
        yield ()
        return
    seen: set[tuple[Any, ...]] = set()
    fillings = list(_fillings(node, shapes[0]))
    for count, left in fillings if len(shapes) > 1 else fillings[-1:]:
        key = (count, left.gpus, round(left.cpus, 6), tuple(sorted(left.shared)))
        if key in seen:
            continue
        seen.add(key)
        for rest in _packings(left, shapes[1:]):
            yield (count, *rest)


def _fillings(node: _Node, shape: Shape) -> Iterator[tuple[int, _Node]]:
    """Every way to put 0, 1, 2... replicas of a shape on a node, a share on any GPU that has room."""
    share = shape.share
    layer = {_key(node): node}
    count = 0
    while layer:
        for left in layer.values():
            yield count, left
        following: dict[tuple[Any, ...], _Node] = {}
        for left in layer.values():
            for after in _one_more(left, shape, share):
                following[_key(after)] = after
        layer, count = following, count + 1


def _key(node: _Node) -> tuple[Any, ...]:
    return node.gpus, round(node.cpus, 6), tuple(sorted(node.shared))


def _one_more(node: _Node, shape: Shape, share: Fraction) -> Iterator[_Node]:
    cpus = node.cpus - shape.cpus
    if cpus < -_ROUNDING:
        return
    if share.denominator == 1:
        if node.gpus >= share:
            yield _Node(node.gpus - int(share), cpus, node.shared)
        return
    for left in set(node.shared):
        if left >= share:
            shared = [*node.shared]
            shared.remove(left)
            yield _Node(node.gpus, cpus, sorted([*shared, left - share]))
    if node.gpus:
        yield _Node(node.gpus - 1, cpus, sorted([*node.shared, 1 - share]))


def _maximal(found: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that no other one exceeds."""
    table = np.array(sorted(found, reverse=True), np.int64)
    kept: list[NDArray[np.int64]] = []
    for row in table:
        if not any((row <= other).all() for other in kept):
            kept.append(row)
    return [tuple(row.tolist()) for row in kept]


class _Block(NamedTuple):
    """Groups of claims of one shape, whose replicas the program counts together."""

    shape: Shape
    table: GainTable
    needs: tuple[int, int] | None
    """The group and the alternative without which it does not count; None: no choice touches it."""
    at: list[int]
    """Which groups these are, where no choice touches them."""


def _blocks(groups: Sequence[Group], room: Mapping[Shape, int]) -> list[_Block]:
    blocks = []
    for shape, most in room.items():
        at = [at for at, group in enumerate(groups) if not _spans(group) and group.claims[0].shape == shape]
        if at:
            blocks.append(_Block(shape, GainTable([groups[each] for each in at], most, _one), None, at))
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

    Raises BudgetError where the least replicas and the reserve cannot be placed.
    """
    shapes = sorted({claim.shape for group in groups for claim in group.claims} | ({Shape(1)} if reserve else set()))
    ways = [(kind, pattern) for kind in nodes if kind.count for pattern in patterns(kind, shapes)]
    room = {
        shape: sum(
            kind.count * max((pattern[at] for other, pattern in ways if other is kind), default=0) for kind in nodes
        )
        for at, shape in enumerate(shapes)
    }
    blocks = _blocks(groups, room)
    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetTimeLimit(_LIMIT_MS)
    chosen = {
        (at, alternative): solver.BoolVar("")
        for at, group in enumerate(groups)
        if _spans(group)
        for alternative in range(len(group.alternatives))
    }
    for at in {at for at, _ in chosen}:
        solver.Add(solver.Sum([each for (other, _), each in chosen.items() if other == at]) == 1)
    taken: dict[Shape, list[Any]] = {shape: [] for shape in shapes}
    picks: list[dict[int, Any]] = []
    objective: list[Any] = []
    for block in blocks:
        best = block.table.best
        useful = np.flatnonzero(best > np.concatenate(([-np.inf], best[:-1])))
        if not len(useful):
            raise BudgetError(_NO_ROOM)
        options = {int(count): solver.BoolVar("") for count in useful}
        picks.append(options)
        solver.Add(solver.Sum(list(options.values())) == (chosen[block.needs] if block.needs else 1))
        taken[block.shape] += [count * each for count, each in options.items() if count]
        objective += [float(best[count]) * each for count, each in options.items()]
    held = [(kind, pattern, solver.IntVar(0, kind.count, "")) for kind, pattern in ways]
    for kind in nodes:
        solver.Add(solver.Sum([each for other, _, each in held if other is kind]) <= kind.count)
    for at, shape in enumerate(shapes):
        places = solver.Sum([pattern[at] * each for _, pattern, each in held if pattern[at]])
        solver.Add(solver.Sum(taken[shape]) + (reserve if shape == Shape(1) else 0) <= places)
    solver.Maximize(solver.Sum(objective))
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, _GAP)
    if solver.Solve(parameters) not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        raise BudgetError(_NO_ROOM)
    choices = [0] * len(groups)
    for (at, alternative), each in chosen.items():
        if each.solution_value() > 0.5:
            choices[at] = alternative
    replicas: dict[str, int] = {}
    for block, options in zip(blocks, picks, strict=True):
        if block.needs and choices[block.needs[0]] != block.needs[1]:
            continue
        counts, made = block.table.split(next(count for count, each in options.items() if each.solution_value() > 0.5))
        replicas |= counts
        for at, choice in zip(block.at, made, strict=False):
            choices[at] = choice
    ordered = {claim.name: replicas[claim.name] for group in groups for claim in group.claims}
    gain = gain_of(groups, ordered, choices)
    return Split(ordered, tuple(choices), gain, max(gain, min(bound, solver.Objective().BestBound())))
