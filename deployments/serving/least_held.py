"""The plainest way to choose: the replica that holds the least, as `policies.cluster.live_tokens` counts it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from pliant.deployments.serving.parcels import Report
from pliant.deployments.serving.table import Choice, NoReplicaError
from pliant.policies.cluster import live_tokens


class Share(NamedTuple):
    """What a request comes to hold in its replica."""

    amount: int = 1
    """In the unit in which replicas report what they hold."""
    near: str | None = None
    """Requests of the same name had better meet in few replicas."""
    predicted_s: float | None = None
    """Within which it is answered, as far as anybody can say."""


class Wanted(Protocol):
    """What is wanted of a replica, as a `Share` says it."""

    @property
    def amount(self) -> int: ...
    @property
    def near(self) -> str | None: ...
    @property
    def predicted_s(self) -> float | None: ...


class LeastHeld:
    """A `Chooser`."""

    def __init__(self) -> None:
        self._held: live_tokens.LiveTokens[str] = live_tokens.LiveTokens()
        self._suspended: set[str] = set()

    def update(self, replica: str, report: Report, others: float) -> None:
        self._held.report(replica, round(others))
        self._suspended.discard(replica)

    def suspend(self, replica: str) -> None:
        self._suspended.add(replica)

    def remove(self, replica: str) -> None:
        self._held.remove(replica)
        self._suspended.discard(replica)

    def share(self, me: str, gateways: Collection[str]) -> None:
        """Requests are long, so what replicas report of the others' is new enough."""

    def choose(self, want: Share, avoid: Collection[str]) -> Choice:
        return self._choose(want, avoid, live_tokens.by_adapter)

    def _choose(self, want: Wanted, avoid: Collection[str], pick: live_tokens.Pick[str]) -> Choice:
        try:
            replica = self._held.choose(want.amount, self._suspended.union(avoid), want.near, pick)
        except live_tokens.NoReplicaError as error:
            raise NoReplicaError(str(error)) from None
        return Choice(replica, want.predicted_s, want.amount)

    def done(self, choice: Choice) -> None:
        self._held.release(choice.replica, choice.work)
