"""What a client asks of a service that has a language model answer."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from pliant.deployments.http.openai_answers import Shape
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.deployments.llm.served_models import ServedModel, ServedModels

S = TypeVar("S", bound=Shape)


class Prepared(NamedTuple, Generic[S]):
    """What a request asks of one language model."""

    generations: list[Generation]
    shape: S
    """How the answers are written."""
    prompt_tokens: int


class AskedOfModels(Generic[S]):
    """`question` is its text, and `prepare` says what would be asked of one of `models`: an `Asked`."""

    def __init__(
        self,
        models: ServedModels,
        question: Callable[[], str],
        prepare: Callable[[ServedModel], Awaitable[Prepared[S]]],
    ) -> None:
        self._models = models
        self._question = question
        self._prepare = prepare
        self._prepared: dict[str, Prepared[S]] = {}

    @property
    def text(self) -> str:
        return self._question()

    async def find(self, name: str) -> ServedModel:
        return await self._models.part(name)

    async def prepared(self, model: ServedModel) -> Prepared[S]:
        """What is asked of `model`. Raises RequestError."""
        if model.name not in self._prepared:
            self._prepared[model.name] = await self._prepare(model)
        return self._prepared[model.name]

    async def begin(self, model: ServedModel, tokens: int) -> Beginning:
        generations = (await self.prepared(model)).generations
        asked = generations[0]
        is_the_answer = len(generations) == 1 and asked.sampling.greedy and asked.prompt_logprobs is None
        alternatives = asked.sampling.logprobs if is_the_answer else 0
        generation = asked._replace(
            id=uuid.uuid4().hex,
            max_tokens=asked.max_tokens if is_the_answer else min(tokens, asked.max_tokens),
            sampling=replace(asked.sampling, temperature=0.0, logprobs=alternatives or 0),
            prompt_logprobs=None,
        )
        beginning = Beginning(model, model.answer(generation), is_the_answer, asked.sampling.logprobs is not None)
        await beginning.read(tokens)
        return beginning


class Beginning:
    """Of the likeliest answer of `model`, whose `pieces` have log probabilities: a `prompts.Beginning`.

    If it `is_the_answer` that the client asked for, it goes on as that; `scored` says whether the client wants log
    probabilities, too.
    """

    def __init__(
        self, model: ServedModel, pieces: AsyncGenerator[Piece, None], is_the_answer: bool, scored: bool
    ) -> None:
        self._model = model
        self._pieces = pieces
        self._is_the_answer = is_the_answer
        self._scored = scored
        self._had: list[Piece] = []

    async def read(self, tokens: int) -> None:
        """Its first so many tokens, or all if it ends before. Raises RequestError."""
        try:
            while sum(len(piece.tokens) for piece in self._had) < tokens:
                self._had.append(await anext(self._pieces))
        except StopAsyncIteration:
            pass
        except BaseException:
            await self.drop()
            raise

    @property
    def logprobs(self) -> Sequence[float]:
        return [row.logprob for row in merged(self._had).logprobs or ()] if self._had else []

    async def go_on(self) -> ServedModel:
        if self._is_the_answer:
            return self._model._replace(begun=self._answer())
        await self.drop()
        return self._model

    async def drop(self) -> None:
        await self._pieces.aclose()

    async def _answer(self) -> AsyncGenerator[Piece, None]:
        async with aclosing(self._pieces):
            for piece in self._had:
                yield self._shown(piece)
            async for piece in self._pieces:
                yield self._shown(piece)

    def _shown(self, piece: Piece) -> Piece:
        return piece if self._scored else piece._replace(logprobs=None)
