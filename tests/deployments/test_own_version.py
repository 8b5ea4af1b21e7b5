"""Which replicas Serve replaces when cluster.yaml changes, by the versions that it is told."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private import build_app
from ray.serve._private.config import DeploymentConfig

from pliant.config.encoder import EncoderConfig
from pliant.deployments import app
from pliant.deployments.own_version import version_of

ROOT = Path(__file__).parents[2]
ARGS: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())["applications"][0]["args"]


def deployed(args: dict[str, Any]) -> dict[str, DeploymentConfig]:
    """What Serve's controller gets of each deployment, of an application of some version."""
    found = {}
    for deployment in build_app.build_app(app.build(deepcopy(args)), name="pliant", default_runtime_env={}).deployments:
        config = deployment._deployment_config
        config.version = "the application's"
        found[deployment.name] = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())
    return found


BEFORE = deployed(ARGS)


def changed(service: str, **options: Any) -> dict[str, DeploymentConfig]:
    args = deepcopy(ARGS)
    args["services"][service] |= options
    return deployed(args)


def others(now: dict[str, DeploymentConfig]) -> set[str]:
    """Deployments of another version than before."""
    return {name for name, config in now.items() if config.version != BEFORE[name].version}


def test_a_change_of_one_service_is_one_of_its_replicas_alone() -> None:
    assert others(changed("topics", slo_ms=777)) == {"topics"}
    assert others(changed("chat", slots=16)) == {"chat"}
    assert others(deployed(ARGS)) == set()


def test_gateway_and_planner_have_the_applications_version() -> None:
    versions = {name: config.version for name, config in BEFORE.items()}
    assert (versions["gateway"], versions["planner"]) == ("the application's", "the application's")
    assert len(set(versions.values())) == len(versions) - 1


def test_more_replicas_replace_none() -> None:
    now = changed("topics", replicas={"min": 2, "max": 4})
    assert others(now) == set()
    assert now["topics"].autoscaling_config
    assert (BEFORE["topics"].num_replicas, now["topics"].autoscaling_config.max_replicas) == (3, 4)


def test_what_a_service_needs_of_another_changes_the_other() -> None:
    """topics-small tells which words are important, as a cascade prunes by that."""
    args = deepcopy(ARGS)
    del args["services"]["topics-c"]
    assert others(deployed(args)) == {"topics-small"}


@pytest.mark.parametrize(
    ("options", "same"),
    [({}, True), ({"residency": "several"}, False), ({"residency": "several", "memory_mb": 100}, True)],
)
def test_replicas_that_share_what_memory_is_free_go_by_their_number(options: dict[str, Any], same: bool) -> None:
    one, more = (
        EncoderConfig.model_validate({"kind": "encoder", "model": "m", "lengths": [64], "replicas": size, **options})
        for size in (1, 2)
    )
    assert (version_of(one, object) == version_of(more, object)) == same
    assert version_of(one, object) != version_of(one, dict)
