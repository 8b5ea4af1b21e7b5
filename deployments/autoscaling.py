"""Ray Serve's side of autoscaling: an application-level policy that gives each deployment what the planner wants.

The decision itself, target tracking of P98 against the SLO (Arlo §4), is `policies/cluster/autoscaling.py`; it needs
what only gateways see, latencies and refused requests, and the planner gathers that. cluster.yaml names this policy as
the application's `autoscaling_policy`; without it nothing scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pliant.config.cluster import PLANNER

STAY = "pliant.deployments.autoscaling:stay"


def stay(context: Any) -> tuple[int, dict[str, Any]]:
    """A deployment's own policy, for when cluster.yaml names none for the application: keep the present number."""
    return context.target_num_replicas, {}


def follow_planner(contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """The number of replicas for each autoscaled deployment; its present target where the planner has said nothing.

    `contexts` maps DeploymentID to AutoscalingContext. Called on every tick of Serve's controller, so it only looks up.
    """
    planner = next((context for deployment, context in contexts.items() if deployment.name == PLANNER), None)
    wanted = _latest(planner.raw_metrics or {}) if planner else {}
    return {
        deployment: int(wanted.get(deployment.name, context.target_num_replicas))
        for deployment, context in contexts.items()
    }, {}


def _latest(metrics: Mapping[str, Mapping[Any, Any]]) -> dict[str, float]:
    """The newest value of each metric, whichever replica recorded it."""
    latest = {}
    for name, by_replica in metrics.items():
        points = [point for series in by_replica.values() for point in series]
        if points:
            latest[name] = max(points, key=lambda point: point.timestamp).value
    return latest
