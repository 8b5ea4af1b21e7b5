"""What one gateway process knows of a language model's replicas, and which of them gets a request.

Plain Python, without Ray. Serve pickles the router class by value, so the router and the gateway meet in this module:
both ask `shared` for the table of their service. All calls come from one event loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Any

from pliant.deployments.llm.messages import ReplicaReport
from pliant.policies.live_tokens import LiveTokens

_tables: dict[str, LlmRoutingTable] = {}


def shared(service: str) -> LlmRoutingTable:
    """The process's table of `service`."""
    return _tables.setdefault(service, LlmRoutingTable())


class LlmRoutingTable:
    """The replicas that are known to live, the latest report of each, and their live tokens."""

    def __init__(self) -> None:
        self.gateway = uuid.uuid4().hex
        """Names this process to the replicas, which report by gateway what they hold."""
        self._tokens: LiveTokens[str] = LiveTokens()
        self._reports: dict[str, ReplicaReport | None] = {}
        self._lost: set[str] = set()
        self._suspects: set[str] = set()

    def sync(self, reports: Mapping[str, ReplicaReport | None]) -> None:
        """The controller's view: the replicas that are running, and what each last reported."""
        self._lost &= reports.keys()
        for replica in self._reports.keys() - reports.keys():
            self._forget(replica)
        for replica, report in reports.items():
            if replica not in self._lost:
                held = report["live_tokens"] if report else {}
                others = sum(tokens for gateway, tokens in held.items() if gateway != self.gateway)
                self._tokens.report(replica, others)
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

    def choose(self, tokens: int, avoid: Collection[str] = (), adapter: str | None = None) -> str:
        """The replica for a request of so many live tokens, counted there until `done`. Raises NoReplicaError."""
        return self._tokens.choose(tokens, self._suspects.union(avoid), adapter)

    def done(self, replica: str, tokens: int) -> None:
        """A request that `choose` sent to `replica` ended, well or not."""
        self._tokens.release(replica, tokens)

    @property
    def ready(self) -> bool:
        """Whether some replica may be chosen now."""
        return bool(self._reports.keys() - self._suspects)

    @property
    def max_length(self) -> int | None:
        """Tokens of a prompt and its answer that every replica has room for; None until one has reported."""
        return min((report["max_length"] for report in self._reports.values() if report), default=None)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """For people: each replica's latest report, and the live tokens that this process has there."""
        return {
            replica: {
                **report,
                "live_tokens": self._tokens.live(replica),
                "outstanding_tokens": self._tokens.own(replica),
            }
            for replica, report in self._reports.items()
            if report
        }

    def _forget(self, replica: str) -> None:
        self._reports.pop(replica, None)
        self._suspects.discard(replica)
        self._tokens.remove(replica)
