"""The application of the end-to-end tests' clusters: ours, with one kind more, and replicas that can be broken."""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from support.echo.config import EchoConfig
from support.echo.kind import ECHO

from e2e.breakable import BREAKABLE
from e2e.scaled import SLEEPING, SleepingReplica
from pliant.config.cluster import Reader
from pliant.deployments import app
from pliant.deployments.kinds import CONFIGS, KINDS

IMPORT_PATH = "e2e.application:build"
READER = Reader((*CONFIGS, EchoConfig))


def build(args: dict[str, Any]) -> Application:
    """As `app.build`; the replicas of each kind are those that can be broken, and those of one service only sleep."""
    config = app.checked(args, READER.parse)
    replicas = {name: BREAKABLE[each.kind] for name, each in config.services.items() if each.replica_range()}
    if SLEEPING in replicas:
        replicas[SLEEPING] = SleepingReplica
    return app.assemble(config, replicas, (*KINDS, ECHO))
