"""What clients may name as a model of text: language models, adapters of them, routes to these, and, in lists, what
makes vectors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from pliant.deployments.http.prompts import Asked, PassedOn, Router
from pliant.deployments.http.text_models import embeds
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.messages import Registered
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving.catalog.confinement import public
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.services import Service, Services

_NAMED = 20
"""Adapters that an error lists."""


class ServedModel(NamedTuple):
    """A language model, alone or with an adapter, and the route by which the request came to it, if it did by one."""

    base: LanguageModel
    registered: Registered | None = None
    passed_on: PassedOn[Any] | None = None
    begun: AsyncGenerator[Piece, None] | None = None
    """The answer, if it began when it was chosen who answers."""

    @property
    def name(self) -> str:
        return self.registered.adapter.name if self.registered else self.base.name

    @property
    def fingerprint(self) -> str:
        """Changes when the same seed may give another answer."""
        revision = self.registered and self.registered.adapter.revision[:10]
        return f"{self.base.fingerprint}-{revision}" if revision else self.base.fingerprint

    def answer(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """As `LanguageModel.answer`."""
        if not self.passed_on:
            return self.base.answer(generation)
        return self.passed_on.answer(self.begun or self.base.answer(generation, self.passed_on.spent_s))

    def card(self) -> dict[str, Any]:
        """As /v1/models shows it."""
        if not self.registered:
            return _card(self.name, self.base.created, self.base.root, None, self.base.max_length)
        folder = self.registered.adapter.folder
        return _card(self.name, self.registered.created, folder, self.base.name, self.base.max_length)


class ServedModels:
    """Looks them up. `adapters` is None if no model takes any."""

    def __init__(self, services: Services, adapters: AdapterFollower | None) -> None:
        self._services = services
        self._adapters = adapters
        self._listed: tuple[object, bytes] = None, b""
        """What the latest listing depends on, and the listing."""

    def __iter__(self) -> Iterator[ServedModel]:
        """The language models that are there by now, then all adapters."""
        models = self._models
        yield from map(ServedModel, models.values())
        for entry in list(self._adapters.known.values()) if self._adapters else ():
            if entry.service in models:
                yield ServedModel(models[entry.service], entry)

    def listing(self) -> bytes:
        """All cards, as /v1/models answers; made anew only after a change, as thousands take a while."""
        version = self._adapters.version if self._adapters else None
        others = list(self._other_cards())
        state = version, [model.max_length for model in self._models.values()], others
        if state != self._listed[0]:
            cards = [served.card() for served in self] + others
            self._listed = state, json.dumps({"object": "list", "data": cards}).encode()
        return self._listed[1]

    async def card(self, name: str) -> dict[str, Any]:
        """That of what is called so. Raises RequestError if nothing is, or it cannot be said."""
        for card in self._other_cards():
            if card["id"] == name:
                return card
        return (await self.find(name)).card()

    async def find(self, name: str | None) -> ServedModel:
        """What is called so; the only language model if no name is given. Raises RequestError if nothing is, or it
        cannot be said, or answer yet, or if it is a route.
        """
        if name is None:
            if len(self._models) != 1:
                reason = f"model: missing; there are: {self._names()}"
                raise RequestError(Outcome.REJECTED, reason, fault=Fault.MISSING_PARAMETER, param="model")
            [name] = self._models
        found = await self.named(name)
        if isinstance(found, ServedModel):
            return found
        reason = f"model: {name} is a route, which only passes on what is to be answered; choose: {self._names()}"
        raise RequestError(Outcome.REJECTED, reason, param="model")

    async def named(self, name: str) -> ServedModel | Router:
        """The same, and routes, too."""
        return await self._opened(name, self._services.begun)

    async def part(self, name: str) -> ServedModel:
        """The language model or adapter that is called so, whoever asks: a router that they may use passes on to it.

        Raises RequestError.
        """
        found = await self._opened(name, self._services.opened)
        assert isinstance(found, ServedModel)
        return found

    async def pass_on(self, router: Router, asked: Asked[ServedModel], answered_by: str | None) -> ServedModel:
        """Who answers what is `asked`, or did before. Raises RequestError."""
        passed_on = await router.pass_on(asked, answered_by)
        return passed_on.model._replace(passed_on=passed_on)

    async def _opened(self, name: str, opened: Callable[[Service], Awaitable[Any]]) -> ServedModel | Router:
        entry = None
        service = self._services.find(name, "prompts")
        if service is None and self._adapters and (entry := await self._adapters.find(name)):
            service = self._services.find(entry.service, "prompts")
        if service is None:
            reason = f"model: there is no {name[:200]!r}; there are: {self._names()}"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.MODEL_NOT_FOUND, param="model")
        endpoint: LanguageModel | Router = await opened(service)
        return ServedModel(endpoint, entry) if isinstance(endpoint, LanguageModel) else endpoint

    @property
    def _models(self) -> dict[str, LanguageModel]:
        found = self._services.endpoints("prompts")
        return {name: endpoint for name, endpoint in found.items() if isinstance(endpoint, LanguageModel)}

    def _other_cards(self) -> Iterator[dict[str, Any]]:
        """Of routes, and of what makes vectors."""
        for service in self._services:
            endpoint = service.endpoint
            if service.answers == "prompts" and endpoint is not None and not isinstance(endpoint, LanguageModel):
                yield _card(service.name, service.created, service.name, None, endpoint.max_length)
            elif service.answers == "texts" and endpoint is not None and embeds(endpoint):
                yield _card(service.name, service.created, endpoint.root, None, endpoint.max_length)

    def _names(self) -> str:
        names = [served.name for served in islice(self, len(self._models) + _NAMED + 1)]
        if len(names) > len(self._models) + _NAMED:
            names[-1] = "and more, which /v1/models lists"
        return ", ".join(names) or "none"


def _card(name: str, created: int, root: str, parent: str | None, max_length: int) -> dict[str, Any]:
    """`root` is where the weights are from."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pliant",
        "root": public(root),
        "parent": parent,
        "max_model_len": max_length,
    }
