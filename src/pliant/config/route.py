"""The config of routes: which of several language models and adapters a request goes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from pliant.config.base import Example, Milliseconds, ServiceConfig, ServiceName

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
        names = {name: service.completes(name) for name, service in services.items()}
        models = [model for found in names.values() for model in found]
        if self.otherwise not in names[self.otherwise]:
            completing = [name for name, found in names.items() if found]
            there = ", ".join(completing) or "none"
            return f"otherwise: {self.otherwise} is no language model; choose one of {there}"
        more = any(catalog.roots for name in names if names[name] for catalog in services[name].catalogs().values())
        for label, model in self.to.items():
            if label not in labels:
                return f"to.{label}: {self.by} has no such label; it has {', '.join(labels)}"
            if model not in models and (model in services or not more):
                return f"to.{label}: got {model}, no language model or adapter; there are: {', '.join(models)}"
        return None

    def example(self, name: str) -> Example:
        messages = [{"role": "user", "content": _QUESTION}]
        return Example("v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 40})
