"""One budget, split so that it gains the most: the outer program, over services of all kinds.

    maximise  sum of gains with n_s replicas  -  cost of starts and stops
    subject to  what the nodes hold, least_s <= n_s <= most_s, and a reserve of whole GPUs that stay free

First as if only the total of GPUs bound: a dynamic program over services and GPUs, exact for gains of any form. Its
split is the best if it can be placed on the nodes, which a first fit mostly shows. Where none does (gangs, shares and
CPUs in each other's way), the split is found together with its placement (`placement`). Its bound is proven. If the
solver finds none in time, replicas are left out until a first fit places the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pliant.policies.cluster.budget import BudgetError, Floats, Group, Nodes, Shape, Split, gain_of, units
from pliant.policies.cluster.gain_table import GainTable
from pliant.policies.cluster.placement import UnsolvedError, first_fit, split_on, thinned

GPU = Shape(1)


def solve(groups: Sequence[Group], nodes: Sequence[Nodes], reserve: int = 0) -> Split:
    """The split of the greatest gain. Raises BudgetError where the least replicas and the reserve do not fit."""
    claims = [claim for group in groups for claim in group.claims]
    free = sum(each.count * each.gpus for each in nodes) - reserve
    if not claims or free < 0:
        if free < 0:
            raise BudgetError(f"a reserve of {reserve} GPUs is more than there are")
        return Split({}, (), 0.0, 0.0)
    relaxed = split_total(groups, free)
    wanted = [(claim.shape, relaxed.replicas[claim.name]) for claim in claims]
    if first_fit([*wanted, (GPU, reserve)], nodes):
        return relaxed
    try:
        return split_on(groups, nodes, reserve, relaxed.bound)
    except UnsolvedError:
        return thinned(groups, nodes, reserve, relaxed)


def split_total(groups: Sequence[Group], gpus: int) -> Split:
    """The best split of so many GPUs, wherever they are; CPUs are not counted.

    Raises BudgetError where the least replicas need more.
    """
    table, parts = _table(groups, gpus)
    if table.best[-1] == -np.inf:
        raise BudgetError(f"the least replicas of all services need more than {gpus} GPUs")
    replicas, choices = table.split(gpus * parts)
    ordered = {claim.name: replicas[claim.name] for group in groups for claim in group.claims}
    gain = gain_of(groups, ordered, choices)
    return Split(ordered, tuple(choices), gain, gain)


def worth_of_gpus(groups: Sequence[Group], gpus: int) -> Floats:
    """What 0 to `gpus` GPUs gain at best, wherever they are: its steps are shadow prices."""
    table, parts = _table(groups, gpus)
    return table.best[::parts]


def _table(groups: Sequence[Group], gpus: int) -> tuple[GainTable, int]:
    """By parts of a GPU, and how many parts that is."""
    parts = units([claim.shape for group in groups for claim in group.claims])
    return GainTable(groups, gpus * parts, lambda shape: int(shape.share * parts)), parts
