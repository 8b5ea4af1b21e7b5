"""Which replica gets a request: the one that holds the fewest live tokens, or for an adapter the one that it prefers.

A request's live tokens are those it may come to hold: its prompt and the longest answer it asked for. They stand for
the two things that requests compete for within a replica, memory for keys and values and time in each decode step,
better than the number of requests does. What this process has sent itself is counted exactly and at once; what
others have sent is as fresh as the replica's last report, so several gateways agree roughly.

The greedy rule keeps replicas close: as long as nothing ends, two of them differ by at most the largest request.
Requests for an adapter go by `adapter_affinity` instead, which bounds how far a replica gets above the mean; requests
for the model itself fill what these leave uneven. Flover and Chameleon run one instance; how to share out requests
among several is beyond the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

from pliant.policies.cluster.adapter_affinity import preferred

R = TypeVar("R", bound=Hashable)


Pick = Callable[[int, Mapping[R, int], str | None], R]
"""Of tokens, what live replicas hold, and an adapter: the replica."""


def by_adapter(tokens: int, live: Mapping[R, int], adapter: str | None) -> R:
    """Without one, the replica with the fewest live tokens."""
    return min(live, key=live.__getitem__) if adapter is None else preferred(adapter, tokens, live)


class NoReplicaError(Exception):
    """There is no replica to choose, or every one is to be avoided."""


class LiveTokens(Generic[R]):
    """The live tokens of each replica, as one process knows them."""

    def __init__(self) -> None:
        self._own: dict[R, int] = {}
        self._others: dict[R, int] = {}

    def report(self, replica: R, others: int) -> None:
        """`replica` may be chosen, and holds `others` live tokens that other processes sent."""
        if others < 0:
            raise ValueError(f"live tokens must be at least 0, got {others}")
        self._own.setdefault(replica, 0)
        self._others[replica] = others

    def remove(self, replica: R) -> None:
        """`replica` is gone, and what it held with it."""
        self._own.pop(replica, None)
        self._others.pop(replica, None)

    def choose(
        self, tokens: int, avoid: Collection[R] = (), adapter: str | None = None, pick: Pick[R] | None = None
    ) -> R:
        """The replica for a request of `tokens`, not one to be avoided; from now on it holds so many more.

        Without an `adapter` it is the one with the fewest live tokens, and among equals the one whose turn is longest
        ago; otherwise it is the one that the adapter prefers within the bound on its load; or else the one that `pick`
        names. Raises NoReplicaError.
        """
        if tokens < 1:
            raise ValueError(f"a request has at least 1 live token, got {tokens}")
        live = {replica: self.live(replica) for replica in self._own if replica not in avoid}
        if not live:
            raise NoReplicaError(f"none of {len(self._own)} replicas may be chosen")
        replica = (pick or by_adapter)(tokens, live, adapter)
        self._own[replica] = self._own.pop(replica) + tokens  # to the end: its turn was now
        return replica

    def release(self, replica: R, tokens: int) -> None:
        """A request of `tokens` that `choose` sent to `replica` ended, well or not."""
        if replica in self._own:
            self._own[replica] -= tokens

    def live(self, replica: R) -> int:
        """Live tokens of `replica`. Raises KeyError when it is not known."""
        return self._own[replica] + self._others[replica]

    def own(self, replica: R) -> int:
        """The share of them that this process sent."""
        return self._own[replica]

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, replica: R) -> bool:
        return replica in self._own
