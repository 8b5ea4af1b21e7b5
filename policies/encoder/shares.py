"""Which replicas each of several dispatchers has for its own."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

R = TypeVar("R", bound=Hashable)


def shares(held: Mapping[R, int], dispatchers: Collection[str]) -> dict[str, list[R]]:
    """By dispatcher: the replicas that it has for its own; `held` is the home of each.

    All dispatchers that know of the same replicas and of each other find the same shares, equal in each group up to one
    replica.
    """
    replicas = sorted(held, key=lambda replica: (held[replica], str(replica)))
    named = sorted(dispatchers)
    return {name: replicas[rank :: len(named)] for rank, name in enumerate(named)}
