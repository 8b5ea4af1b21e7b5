"""What a budget has left for replicas whose number may change, in the terms of the program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from pliant.policies.cluster.budget import Nodes, Shape

_LEAST = 0.01
"""CPUs of a replica that reserves none."""


def free(nodes: Sequence[Nodes], taken: Iterable[Shape]) -> list[Nodes]:
    """What `nodes` have beside the replicas `taken`, each of which is on a node with as little left as may be.

    What has room nowhere is left out: it does not run.
    """
    left = [[each.gpus, each.cpus] for each in nodes for _ in range(each.count)]
    for shape in sorted(taken, reverse=True):
        gpus = math.ceil(shape.gpus)
        fits = [node for node in left if node[0] >= gpus and node[1] >= shape.cpus - 1e-9]
        if fits:
            node = min(fits)
            node[0] -= gpus
            node[1] = max(0.0, node[1] - shape.cpus)
    alike = Counter((int(gpus), cpus) for gpus, cpus in left)
    return [Nodes(count, gpus, cpus) for (gpus, cpus), count in alike.items()]


def counted(nodes: Sequence[Nodes]) -> list[Nodes]:
    """`nodes` as the program has them: where there are no GPUs, each whole CPU is what a GPU is elsewhere."""
    if any(each.gpus for each in nodes):
        return list(nodes)
    return [Nodes(each.count, int(each.cpus + 1e-9)) for each in nodes]


def shape_of(gpus: float, cpus: float, nodes: Sequence[Nodes]) -> Shape:
    """What a replica takes of what `counted` has made of `nodes`: a share of a CPU, or whole ones, without GPUs."""
    if any(each.gpus for each in nodes):
        return Shape(gpus, cpus or (0.0 if gpus else _LEAST))
    return Shape(max(cpus, _LEAST) if cpus < 1 else math.ceil(cpus))
