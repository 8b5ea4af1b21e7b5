"""Which replicas Serve stops first, as Serve's own scheduler has it."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import DeploymentScheduler, SpreadDeploymentSchedulingPolicy

from pliant.deployments.serving.scale_in import first_to_stop


@pytest.mark.parametrize("seed", range(50))
def test_serve_stops_what_is_foreseen(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [f"n{number}" for number in range(rng.randint(1, 4))]
    first = rng.choice(nodes)
    labels = SimpleNamespace(get_node_labels=lambda _node: {})
    scheduler = DeploymentScheduler(labels, first, lambda: None)  # type: ignore[arg-type]
    deployments = [DeploymentID(name=name, app_name="app") for name in ("gateway", "topics", "chat")]
    for deployment in deployments:
        scheduler.on_deployment_created(deployment, SpreadDeploymentSchedulingPolicy())
    placed: dict[str, str] = {}
    topics: list[ReplicaID] = []
    for number in range(rng.randint(3, 20)):
        deployment = rng.choice(deployments)
        replica, node = ReplicaID(str(number), deployment), rng.choice(nodes)
        scheduler.on_replica_running(replica, node)
        placed[str(number)] = node
        topics += [replica] * (deployment is deployments[1])
    crowds = Counter(placed.values())

    def rank(replica: str) -> tuple[bool, int]:
        return placed[replica] == first, crowds[placed[replica]]

    order = first_to_stop([replica.unique_id for replica in topics], placed, first)
    assert sorted(order) == sorted(replica.unique_id for replica in topics)
    for number in range(1, len(topics) + 1):
        stopped = {replica.unique_id for replica in scheduler._get_replicas_to_stop(deployments[1], number)}
        foreseen, came_true = (
            Counter((placed[each] == first, crowds[placed[each]]) for each in some)
            for some in (order[:number], stopped)
        )
        assert foreseen == came_true
        if len({*crowds.values()}) == len(crowds):  # else Serve takes the node first that it knew first
            assert stopped == set(order[:number])


def test_a_replica_of_which_nobody_knows_the_node_has_left_already() -> None:
    assert first_to_stop(["old", "gone", "new"], {"old": "n", "new": "n"}, "n") == ["new", "old"]
