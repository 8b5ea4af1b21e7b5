"""Which replica of a vision service gets an image: the least busy. See `replica_table`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pliant.deployments.serving.replica_table import ReplicaTable
from pliant.deployments.vision.report import ReplicaReport

_tables: dict[str, VisionRoutingTable] = {}


def shared(service: str) -> VisionRoutingTable:
    """The process's table of `service`."""
    return _tables.setdefault(service, VisionRoutingTable())


class VisionRoutingTable(ReplicaTable[ReplicaReport]):
    """Any image takes the same time, so that each is one live token."""

    def choose(self, avoid: Collection[str] = ()) -> str:
        """The replica for an image, counted there until `done`. Raises NoReplicaError."""
        return self._tokens.choose(1, self._suspects.union(avoid))

    def done(self, replica: str) -> None:
        """An image that `choose` sent to `replica` is answered, or never will be."""
        self._tokens.release(replica, 1)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """For people: each replica's latest report, and the images that this process has there."""
        return {
            replica: {**report, "outstanding": self._tokens.own(replica)}
            for replica, report in self._reports.items()
            if report
        }

    def _held(self, report: ReplicaReport) -> Mapping[str, int]:
        return report["outstanding"]
