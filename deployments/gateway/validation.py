"""What every protocol checks of a request before its inputs are looked at: the model, and how many there are."""

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


def bounded(inputs: list[M], most: int, what: str) -> list[M]:
    """`inputs`, if there are some and at most `most`; else raises RequestError 400 or 413. `what` each of them is."""
    check_count(len(inputs), most, what)
    return inputs


def check_count(inputs: int, most: int, what: str) -> None:
    """Raise RequestError 400 or 413 unless so many `inputs` may be in a request. `what` each of them is."""
    if not inputs:
        raise RequestError(400, f"inputs: got no {what}; send at least one")
    if inputs > most:
        raise RequestError(413, f"{inputs} {what}s in one request; at most {most} are allowed")
