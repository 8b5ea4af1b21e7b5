"""The config of routes: which of several language models and adapters a request goes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from pliant.config.base import Example, Milliseconds, ServiceConfig, ServiceName
from pliant.config.llm import LlmConfig

_QUESTION = "What is a task group?"


class RouteConfig(ServiceConfig):
    """A name under which a classifier chooses which language model or adapter answers."""

    kind: Literal["route"]
    by: ServiceName
    """The service that labels each prompt: an encoder or a cascade of the same file; others may use it, too."""
    to: Annotated[dict[str, str], Field(min_length=1)]
    """By label: the language model or adapter that answers.

    An adapter that is not there from the start may be named where a language model has `adapters.roots`, from which it
    may be loaded later.
    """
    otherwise: ServiceName
    """The language model that answers prompts of other labels, and where the classifier or what it chose cannot. No
    adapter, as those may be unloaded."""
    slo_ms: Milliseconds = 1000
    """Within what time it must be known who answers; later, `otherwise` does."""

    def parts(self) -> tuple[str, ...]:
        return (self.by, self.otherwise)

    def conflicts(self, services: Mapping[str, ServiceConfig]) -> Iterator[str]:
        for key, name in (("by", self.by), ("otherwise", self.otherwise)):
            if name not in services:
                yield f"{key}: got {name}; there is no such service; there are: {', '.join(services)}"

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        """What keeps the classifier from choosing, or those that it may choose from answering."""
        if not (labels := services[self.by].labels(services)):
            choosing = [name for name, service in services.items() if service.labels(services)]
            return f"by: {self.by} does not choose one of several labels; choose one of {', '.join(choosing) or 'none'}"
        models = {name: service for name, service in services.items() if isinstance(service, LlmConfig)}
        if self.otherwise not in models:
            there = ", ".join(models) or "none"
            return f"otherwise: {self.otherwise} is no language model; choose one of {there}"
        if self.slo_ms > (most := models[self.otherwise].slo_ms):
            return (
                f"slo_ms: got {self.slo_ms:g}; {self.otherwise}, off whose slo_ms it is taken, has {most:g}; lower it"
            )
        names = [name for model, service in models.items() for name in (model, *service.adapter_names())]
        more = any(service.adapters and service.adapters.roots for service in models.values())
        for label, model in self.to.items():
            if label not in labels:
                return f"to.{label}: {self.by} has no such label; it has {', '.join(labels)}"
            if model not in names and (model in services or not more):
                return f"to.{label}: got {model}, no language model or adapter; there are: {', '.join(names)}"
        return None

    def example(self, name: str) -> Example:
        messages = [{"role": "user", "content": _QUESTION}]
        return Example("v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 40})
