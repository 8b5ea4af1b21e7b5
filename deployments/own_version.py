"""Which replicas a changed cluster.yaml replaces: those of services whose own part of it has changed.

Serve gives all deployments of an application one version, that of all its arguments, so that a word that changes for
one service would load the models of all anew. It sets the version in each deployment's configuration as it builds the
application; here that keeps its own.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import PrivateAttr
from ray import serve
from ray.serve._private.config import DeploymentConfig

from pliant import __version__
from pliant.config.base import ServiceConfig


class _OwnVersion(DeploymentConfig):
    """Has the version that it was given first, whatever is set later."""

    _own: str = PrivateAttr("")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self._own if name == "version" else value)


def with_own_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """`deployment`, whose replicas are replaced only when its resources or `version` are others."""
    given = deployment._deployment_config
    config = _OwnVersion.model_construct(given.model_fields_set, **dict(given))
    config._own = version
    deployment._deployment_config = config
    return deployment


def version_of(config: ServiceConfig, target: type) -> str:
    """That of what a replica, a `target`, computes with."""
    told = [__version__, target.__module__, target.__qualname__, config.of_a_replica()]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
