"""Which replica computes for an adapter: nearly always the same one, unless it has too much to do already.

A replica that has an adapter resident need not load it, and the fewer replicas an adapter is on, the more adapters all
replicas together keep. Chameleon (§4) manages one replica's cache; how to share adapters out among several is beyond
the paper. Two known ideas do it without any state: rendezvous hashing gives each adapter an order of all replicas in
which a replica that comes or goes changes nothing else, and bounded loads stop a popular adapter from piling up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

R = TypeVar("R", bound=Hashable)

SLACK = 0.25
"""By how much of the mean load a replica may be above it and still get its adapters' requests."""
AHEAD = 4
"""And by how many requests: so few slow each other less than a load would. At low load an adapter has one replica."""


def bound(tokens: int, live: Mapping[R, int]) -> float:
    """Live tokens that a replica may come to hold by taking a request of `tokens`, `live` being those of all now."""
    return (1 + SLACK) * sum(live.values()) / len(live) + AHEAD * tokens


def preferred(adapter: str, tokens: int, live: Mapping[R, int]) -> R:
    """The replica for a request of `tokens` for `adapter`: the first in the adapter's order that stays within `bound`.

    There always is one, as the replica with the fewest live tokens stays within. `live` has each replica's live tokens,
    at least one replica. All processes agree on the order: it depends on the names alone.
    """
    most = bound(tokens, live)
    return max(
        (replica for replica in live if live[replica] + tokens <= most), key=lambda replica: _weight(adapter, replica)
    )


@lru_cache(maxsize=2**13)
def _weight(adapter: str, replica: Hashable) -> bytes:
    """The greater, the earlier `replica` comes in the order of `adapter`; as good as random."""
    return blake2b(f"{replica}\0{adapter}".encode(), digest_size=8).digest()
