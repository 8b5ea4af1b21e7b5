"""A cluster of its own, behind the edge that the environment asks for: `python -m pliant.bench.edge.server`.

It prints its address once it answers, and ends when its standard input does.
"""

from __future__ import annotations

import sys

from pliant.bench.cluster import cluster
from pliant.bench.router.apps import ours

MODEL = "zoo/topics-small"
SERVICE = "topics"
GATEWAYS = 2
_REPLICAS = 2
_CPUS = 0.05


def main() -> None:
    """Two gateways before a model that does nothing."""
    with cluster({"ours": ours(MODEL, _REPLICAS, _CPUS, SERVICE, GATEWAYS)}) as address:
        print(f"{address}/ours/models/{SERVICE}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
