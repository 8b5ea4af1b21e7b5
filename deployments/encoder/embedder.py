"""A service as protocols see it whose model makes a vector of each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.encoder.reading import Reader
from pliant.deployments.http.parameters import EmbedParameters
from pliant.deployments.http.texts import Embedding, Input, Priority, Relevance
from pliant.deployments.serving.courier import each
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.models.encoder_head import Task
from pliant.texts import Pair

Vector = NDArray[np.float32]

_QUERY = ("query",)
_DOCUMENT = ("document", "passage", "corpus")
"""What models call the prompts of texts that are searched with, and of those that are found."""
_SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "cosine": lambda one, other: float(_unit(one) @ _unit(other)),
    "dot": lambda one, other: float(one @ other),
    "euclidean": lambda one, other: -float(np.linalg.norm(one - other)),
    "manhattan": lambda one, other: -float(np.abs(one - other).sum()),
}
"""By sentence-transformers' names; the higher, the more alike."""


class Embedder(Reader):
    """Makes vectors of texts, and compares texts by them."""

    task: ClassVar[Task] = "embed"

    @property
    def dimensions(self) -> int:
        return self.info.dimensions

    @property
    def root(self) -> str:
        """Where its weights are from."""
        return self._config.model

    @property
    def max_length(self) -> int:
        """Tokens of a text."""
        return self._longest

    async def embed(self, texts: Sequence[Input], parameters: EmbedParameters) -> list[Embedding]:
        """Of all `texts`, or raise the RequestError of the first that fails."""
        prompt = self._prompt(parameters.prompt_name)
        size, most = parameters.dimensions, self.info.dimensions
        if size is not None and size > most:
            reason = f"dimensions: got {size}; embeddings of {self.name} have {most}"
            raise RequestError(Outcome.REJECTED, reason, param="dimensions")
        return await each([self._embed(text, prompt, parameters) for text in texts])

    async def relevance(self, pairs: Sequence[Pair], priority: Priority) -> list[Relevance]:
        """How much alike the two texts of each pair are, the first as a query. Raises RequestError."""
        firsts = list(dict.fromkeys(pair.first for pair in pairs))
        seconds = list(dict.fromkeys(pair.second for pair in pairs))
        plain = EmbedParameters(slo_ms=priority.slo_ms, utility=priority.utility)
        query, document = (self._first_prompt(names) for names in (_QUERY, _DOCUMENT))
        asked = [(text, query) for text in firsts] + [(text, document) for text in seconds]
        found = await each([self._embed(text, prompt, plain) for text, prompt in asked])
        queries, documents = (
            dict(zip(firsts, found, strict=False)),
            dict(zip(seconds, found[len(firsts) :], strict=True)),
        )
        read = {id(one): one.tokens for one in found}
        return [
            Relevance(
                self.similarity(one.vector, other.vector),
                read.pop(id(one), 0) + read.pop(id(other), 0),
            )
            for one, other in ((queries[pair.first], documents[pair.second]) for pair in pairs)
        ]

    def similarity(self, one: Vector, other: Vector) -> float:
        return _SIMILARITIES[self.info.similarity](one, other)

    async def _embed(self, text: Input, prompt: str, parameters: EmbedParameters) -> Embedding:
        if isinstance(text, Pair):
            reason = f"{self.name} embeds single texts; got a pair"
            raise RequestError(Outcome.REJECTED, reason)
        reading = await self.ask(prompt + text if isinstance(text, str) else text, parameters, parameters.truncate)
        vector = reading.logits[: parameters.dimensions]
        cut = len(vector) < len(reading.logits)
        if parameters.normalize or (cut and self.info.normalized and parameters.normalize is None):
            vector = _unit(vector)
        return Embedding(vector, reading.tokens, reading.warning, reading.revision)

    def _prompt(self, name: str | None) -> str:
        if name is None:
            return self.info.default_prompt
        if (prompt := self.info.prompts.get(name)) is None:
            known = ", ".join(self.info.prompts) or "none"
            reason = f"prompt_name: got {name!r}; prompts of {self.name}: {known}"
            raise RequestError(Outcome.REJECTED, reason, param="prompt_name")
        return prompt

    def _first_prompt(self, names: Sequence[str]) -> str:
        return next((self.info.prompts[name] for name in names if name in self.info.prompts), self.info.default_prompt)


def _unit(vector: Vector) -> Vector:
    found: Vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return found
