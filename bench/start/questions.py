"""A proper request to each service, as a new user would send it first."""

from __future__ import annotations

import base64
import io
import json
from typing import Any, NamedTuple

from PIL import Image

from pliant.config.cluster import ServingConfig

_TEXT = "The yield expression is used when defining a generator function"
_PROMPT = "The for statement is used to"
_TASK = "digit"
"""That the zoo's vision tasks have."""


class Question(NamedTuple):
    """A request; POST of `body`, JSON, or GET if there is none."""

    path: str
    body: bytes | None = None


def questions(serving: ServingConfig) -> dict[str, Question]:
    """A request to each service, by its name."""
    bodies: dict[str, dict[str, Any]] = {
        **{name: {"inputs": _TEXT} for name in (*serving.encoders, *serving.cascades)},
        **{name: {"inputs": _image(), "parameters": {"task": _TASK}} for name in serving.visions},
        **{name: {"model": name, "prompt": _PROMPT, "max_tokens": 8} for name in serving.llms},
    }
    paths = {name: "/v1/completions" if name in serving.llms else f"/models/{name}" for name in serving.services}
    return {name: Question(path, json.dumps(bodies[name]).encode()) for name, path in paths.items()}


def _image() -> str:
    """An empty picture, as PNG in base64."""
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
