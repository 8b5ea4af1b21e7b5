"""What every protocol checks of a request before its texts are looked at: the model, and how many texts there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pliant.deployments.gateway.errors import RequestError

M = TypeVar("M")

VERSION = "1"
"""The one version that each model has."""


def finder(models: Mapping[str, M]) -> Callable[..., M]:
    """Looks a model up by name and version; raises RequestError 404 that lists the models there are."""

    def find(model: str, version: str = VERSION) -> M:
        if model not in models:
            raise RequestError(404, f"no model {model!r}; there are: {', '.join(models) or 'none'}")
        if version != VERSION:
            raise RequestError(404, f"no version {version!r} of {model}; there is: {VERSION}")
        return models[model]

    return find


def bounded(texts: list[str], most: int) -> list[str]:
    """`texts`, if there are some and at most `most`; else raises RequestError 400 or 413."""
    if not texts:
        raise RequestError(400, "inputs: got no text; send at least one")
    if len(texts) > most:
        raise RequestError(413, f"{len(texts)} texts in one request; at most {most} are allowed")
    return texts
