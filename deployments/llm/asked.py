"""What a client asks of a service that has a language model answer."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from pliant.deployments.llm.request import Generation, merged
from pliant.deployments.llm.served_models import ServedModel, ServedModels


@dataclass(frozen=True)
class AskedOfModels:
    """`question` is its text, and `generation` says what of one of `models` would be asked: an `Asked`."""

    models: ServedModels
    question: Callable[[], str]
    generation: Callable[[ServedModel], Awaitable[Generation]]

    @property
    def text(self) -> str:
        return self.question()

    async def find(self, name: str) -> ServedModel:
        return await self.models.part(name)

    async def begin(self, model: ServedModel, tokens: int) -> Sequence[float]:
        asked = await self.generation(model)
        beginning = asked._replace(
            id=uuid.uuid4().hex,
            max_tokens=min(tokens, asked.max_tokens),
            sampling=replace(asked.sampling, temperature=0.0, logprobs=0),
            prompt_logprobs=None,
        )
        async with aclosing(model.answer(beginning)) as pieces:
            found = merged([piece async for piece in pieces])
        return [row.logprob for row in found.logprobs or ()]
