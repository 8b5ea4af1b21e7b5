"""Which replicas Ray Serve stops when it is told to have fewer: it asks nobody, but its choice can be foreseen.

So what those hold that will go, others take over before Serve is told. Where Serve chooses otherwise, the planner makes
good for it afterwards.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from pliant.deployments.nodes import head, replicas


def first_to_stop(oldest_first: Sequence[str], nodes: Mapping[str, str], first: str) -> list[str]:
    """A deployment's replicas in the order in which Serve stops them; `nodes` has the node of every replica of Serve.

    Those on the `first` node go last, as the others can be given back, those on nodes with the fewest replicas before
    others, and the newest of a node before older ones.
    """
    crowds = Counter(nodes.values())
    places = list(crowds)

    def place(replica: str) -> tuple[bool, int, int]:
        node = nodes[replica]
        return node == first, crowds[node], places.index(node)

    return sorted((replica for replica in reversed(oldest_first) if replica in nodes), key=place)


async def foreseen(oldest_first: Sequence[str]) -> list[str]:
    """`first_to_stop` of the Ray that this process is part of."""
    nodes, first = await asyncio.gather(asyncio.to_thread(replicas), asyncio.to_thread(head))
    return first_to_stop(oldest_first, nodes, first)
