"""What every protocol checks of a request before its inputs are looked at: the model, and how many there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.services import Answers, Service, Services

M = TypeVar("M")

VERSION = "1"
"""The one version that each model has."""


def finder(services: Services, *kinds: Answers) -> Callable[..., Awaitable[Service]]:
    """Looks a service of these kinds up by name and version, and makes sure that it may be asked.

    Raises RequestError, which lists the models there are, or says what one waits for that cannot answer yet.
    """

    async def find(model: str, version: str = VERSION) -> Service:
        service = named(services, kinds, model, version)
        await services.begun(service)
        return service

    return find


def named(services: Services, kinds: Sequence[Answers], model: str, version: str = VERSION) -> Service:
    """The service of these kinds with this name and version. Raises RequestError 404 that lists those there are."""
    if (service := services.find(model, *kinds)) is None:
        there = ", ".join(service.name for service in services if service.answers in kinds) or "none"
        raise RequestError(Outcome.REJECTED, f"no model {model!r}; there are: {there}", fault=Fault.NOT_FOUND)
    if version != VERSION:
        raise RequestError(
            Outcome.REJECTED, f"no version {version!r} of {model}; there is: {VERSION}", fault=Fault.NOT_FOUND
        )
    return service


def bounded(inputs: list[M], most: int, what: str) -> list[M]:
    """`inputs`, if there are some and at most `most`; else raises RequestError. `what` each of them is."""
    check_count(len(inputs), most, what)
    return inputs


def check_count(inputs: int, most: int, what: str) -> None:
    """Raise RequestError unless so many `inputs` may be in a request. `what` each of them is."""
    if not inputs:
        raise RequestError(Outcome.REJECTED, f"inputs: got no {what}; send at least one")
    if inputs > most:
        raise RequestError(
            Outcome.REJECTED, f"{inputs} {what}s in one request; at most {most} are allowed", fault=Fault.TOO_LARGE
        )
