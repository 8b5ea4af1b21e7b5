"""What Ray Serve itself asks of a cluster.yaml, in one line for each thing that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from pliant.config.problems import explain
from pliant.errors import ConfigError


def check(path: Path) -> None:
    """Whether `serve run` takes the file, in which nothing of pliant's own is wrong. Raises ConfigError."""
    try:
        ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        raise ConfigError(list(explain(error, ServeDeploySchema))) from None
