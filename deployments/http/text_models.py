"""Finds the service that a body names as its `model`, of those that do with texts what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pliant.deployments.http.texts import task_of
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.services import Services


def embeds(endpoint: Any) -> bool:
    return task_of(endpoint) == "embed"


def labels(endpoint: Any) -> bool:
    return task_of(endpoint) == "classify"


def scores(endpoint: Any) -> bool:
    """Whether it says how well two texts suit each other, as far as its sort says."""
    return hasattr(endpoint, "relevance")


async def find(services: Services, model: str, fits: Callable[[Any], bool], does: str) -> Any:
    """The endpoint of the service that is called `model`, which must be one that `fits`.

    Raises RequestError, which lists those that there are, or says what one waits for that cannot answer yet. `does` are
    words for what they do.
    """
    service = services.find(model, "texts")
    if service is None:
        reason = f"model: there is no {model[:200]!r} that {does}; there are: {_fitting(services, fits)}"
        raise RequestError(Outcome.REJECTED, reason, fault=Fault.MODEL_NOT_FOUND, param="model")
    endpoint = await services.begun(service)
    if not fits(endpoint):
        reason = f"model: {model} {_DOES[task_of(endpoint)]}; choose one that {does}: {_fitting(services, fits)}"
        raise RequestError(Outcome.REJECTED, reason, param="model")
    return endpoint


_DOES = {"classify": "labels texts", "tokens": "labels the tokens of texts", "embed": "makes vectors of texts"}


def _fitting(services: Services, fits: Callable[[Any], bool]) -> str:
    return ", ".join(name for name, endpoint in services.endpoints("texts").items() if fits(endpoint)) or "none"
