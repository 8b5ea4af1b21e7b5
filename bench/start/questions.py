"""A proper request to each service, as a new user would send it first."""

from __future__ import annotations

import json
from typing import NamedTuple

from pliant.config.cluster import ServingConfig


class Question(NamedTuple):
    """A request; POST of `body`, JSON, or GET if there is none."""

    path: str
    body: bytes | None = None


def questions(serving: ServingConfig) -> dict[str, Question]:
    """A request to each service, by its name: the one that `pliant serve` proposes."""
    examples = {name: service.example(name) for name, service in serving.services.items()}
    return {name: Question(f"/{path}", json.dumps(body).encode()) for name, (path, body) in examples.items()}
