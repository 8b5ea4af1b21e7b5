"""The config of cascades of language models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from pliant.config.base import Example, Milliseconds, ServiceConfig, ServiceName
from pliant.config.llm import EXAMPLE_PROMPT, LlmConfig
from pliant.errors import DataError
from pliant.training import labelled_prompts


class LlmCascadeConfig(ServiceConfig):
    """A name under which a small language model answers what it is sure enough of, and a large one the rest.

    The small one begins each answer; by how likely it finds its own first tokens it goes on, or the large one answers.
    A stream begins once that is decided.
    """

    kind: Literal["llm-cascade"]
    levels: tuple[ServiceName, ServiceName]
    """Two language models of the same file, the small one first; others may use them, too."""
    data: str
    """A file of JSON lines of prompts like those to come, {"prompt": …} or {"messages": […]}, each with an "answer"
    that a right one contains, or none with one: then the large model's own answers count as right."""
    loss: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """The share of all answers that may be worse than the large model's."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The chance that the labelled prompts misled us about it."""
    answer_tokens: Annotated[int, Field(ge=1, le=1024)] = 64
    """Of an answer to a labelled prompt, by which it is judged."""
    slo_ms: Milliseconds = 1000
    """Within what time it must be known who answers; later, the large model does."""

    @property
    def small(self) -> str:
        return self.levels[0]

    @property
    def large(self) -> str:
        return self.levels[1]

    def parts(self) -> tuple[str, ...]:
        return self.levels

    def conflicts(self, services: Mapping[str, ServiceConfig]) -> Iterator[str]:
        models = {name: service for name, service in services.items() if isinstance(service, LlmConfig)}
        for index, level in enumerate(self.levels):
            if level not in models:
                kind = services[level].kind if level in services else "no service"
                yield f"levels.{index}: got {level}, {kind}; must be a language model: {', '.join(models) or 'none'}"
        if self.small == self.large:
            yield f"levels: got {self.small} twice; name a small language model and a large one"
        elif self.large in models and self.slo_ms > (most := models[self.large].slo_ms):
            yield f"slo_ms: got {self.slo_ms:g}; {self.large}, off whose slo_ms it is taken, has {most:g}; lower it"

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        """What keeps the labelled prompts from telling about the levels."""
        try:
            labelled_prompts.read(self.data)
        except DataError as error:
            return f"data: {error}"
        return None

    def example(self, name: str) -> Example:
        return Example("v1/completions", {"model": name, "prompt": EXAMPLE_PROMPT, "max_tokens": 40})
