"""What one gateway process knows of a service's replicas, where each request is live tokens and the gateway chooses.

Plain Python, without Ray. Serve pickles a router class by value, so that the router and the gateway meet in the modules
of their services' tables: both ask `shared` there. All calls come from one event loop.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pliant.policies.cluster.live_tokens import LiveTokens

R = TypeVar("R", bound=Mapping[str, Any])


class ReplicaTable(ABC, Generic[R]):
    """The replicas that are known to live, the latest report of each, and their live tokens."""

    def __init__(self) -> None:
        self.gateway = uuid.uuid4().hex
        """Names this process to the replicas, which report by gateway what they hold."""
        self._tokens: LiveTokens[str] = LiveTokens()
        self._reports: dict[str, R | None] = {}
        self._lost: set[str] = set()
        self._suspects: set[str] = set()

    @abstractmethod
    def _held(self, report: R) -> Mapping[str, int]:
        """The live tokens of the replica by gateway."""

    def sync(self, reports: Mapping[str, R | None]) -> None:
        """The controller's view: the replicas that are running, and what each last reported."""
        self._lost &= reports.keys()
        for replica in self._reports.keys() - reports.keys():
            self._forget(replica)
        for replica, report in reports.items():
            if replica not in self._lost:
                held = self._held(report) if report else {}
                self._tokens.report(replica, sum(held.values()) - held.get(self.gateway, 0))
                self._reports[replica] = report

    def lose(self, replica: str) -> None:
        """`replica` died: it is never chosen again, even while the controller still lists it."""
        self._lost.add(replica)
        self._forget(replica)

    def suspect(self, replica: str) -> None:
        """`replica` cannot be reached: send it nothing until `trust` is called."""
        self._suspects.add(replica)

    def trust(self, replica: str) -> None:
        """`replica` may be reached again, if it still lives."""
        self._suspects.discard(replica)

    @property
    def ready(self) -> bool:
        """Whether some replica may be chosen now."""
        return bool(self._reports.keys() - self._suspects)

    def _forget(self, replica: str) -> None:
        self._reports.pop(replica, None)
        self._suspects.discard(replica)
        self._tokens.remove(replica)
