"""Which replica of a language model gets a request: the one with the fewest live tokens. See `replica_table`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.serving.replica_table import ReplicaTable

_tables: dict[str, LlmRoutingTable] = {}


def shared(service: str) -> LlmRoutingTable:
    """The process's table of `service`."""
    return _tables.setdefault(service, LlmRoutingTable())


class LlmRoutingTable(ReplicaTable[ReplicaReport]):
    """The live tokens of requests are their prompts' and answers'."""

    def choose(self, tokens: int, avoid: Collection[str] = (), adapter: str | None = None) -> str:
        """The replica for a request of so many live tokens, counted there until `done`. Raises NoReplicaError."""
        return self._tokens.choose(tokens, self._suspects.union(avoid), adapter)

    def done(self, replica: str, tokens: int) -> None:
        """A request that `choose` sent to `replica` ended, well or not."""
        self._tokens.release(replica, tokens)

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

    def _held(self, report: ReplicaReport) -> Mapping[str, int]:
        return report["live_tokens"]
