"""What a budget has left for replicas whose number may change, in the terms of the program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from pliant.policies.cluster.budget import Nodes, Shape, units
from pliant.policies.cluster.placement import Node, place

_LEAST = 0.01
"""CPUs of a replica that reserves none."""


def free(nodes: Sequence[Nodes], taken: Iterable[Shape]) -> list[Nodes]:
    """What `nodes` have beside the replicas `taken`, each of which is on a node with as little left as may be, and on a
    GPU with others if it takes a share of one. What is left of such a GPU is nobody's.

    What has room nowhere is left out: it does not run.
    """
    left = [Node(each.gpus, each.cpus, []) for each in nodes for _ in range(each.count)]
    shapes = sorted(taken, reverse=True)
    parts = units(shapes)
    for shape in shapes:
        place(int(shape.share * parts), shape.cpus, parts, left)
    alike = Counter((node.gpus, max(0.0, node.cpus)) for node in left)
    return [Nodes(count, gpus, cpus) for (gpus, cpus), count in alike.items()]


def has_gpus(cluster: Sequence[Nodes]) -> bool:
    return any(each.gpus for each in cluster)


def counted(nodes: Sequence[Nodes], cluster: Sequence[Nodes]) -> list[Nodes]:
    """`nodes` as the program has them: where the `cluster` has no GPUs, each whole CPU is what a GPU is elsewhere."""
    if has_gpus(cluster):
        return list(nodes)
    return [Nodes(each.count, int(each.cpus + 1e-9)) for each in nodes]


def shape_of(gpus: float, cpus: float, cluster: Sequence[Nodes]) -> Shape:
    """What a replica takes of what `counted` has made of nodes: a share of a CPU, or whole ones, without GPUs."""
    if has_gpus(cluster):
        return Shape(gpus, cpus or (0.0 if gpus else _LEAST))
    return Shape(max(cpus, _LEAST) if cpus < 1 else math.ceil(cpus))
