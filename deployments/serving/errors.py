"""What may happen to a call between a gateway and a replica."""

from __future__ import annotations


class ReplicaLostError(Exception):
    """The replica died, or could not be reached, before it answered."""


class ReplicaLeftError(Exception):
    """The call was not sent: the replica has left, or cannot be reached."""


class OutdatedPlannerError(Exception):
    """A replica has heard of a newer planner, and obeys no other."""


class NotDeployedError(Exception):
    """The service has no replicas at all just now."""
