"""The application of the end-to-end tests' cluster: ours, with one kind more."""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from support.echo.config import EchoConfig
from support.echo.kind import ECHO

from pliant.config.cluster import Reader
from pliant.deployments import app
from pliant.deployments.kinds import CONFIGS, KINDS

IMPORT_PATH = "e2e.application:build"
READER = Reader((*CONFIGS, EchoConfig))


def build(args: dict[str, Any]) -> Application:
    """As `app.build`."""
    return app.assemble(app.checked(args, READER.parse), listed=(*KINDS, ECHO))
