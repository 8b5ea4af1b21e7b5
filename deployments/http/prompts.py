"""What protocols ask of a service that takes prompts and has another one answer them."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Beginning(Protocol[T_co]):
    """Of an answer. It is under way until it is told to go on or to drop."""

    @property
    def logprobs(self) -> Sequence[float]:
        """The natural logarithms of the probabilities of its tokens."""

    async def go_on(self) -> T_co:
        """The model, to answer: with this, if that is how the answer that was asked for begins."""

    async def drop(self) -> None:
        """Nothing more of it is computed."""


class Asked(Protocol[T]):
    """What a client asks. All of it raises RequestError where that cannot be had."""

    @property
    def text(self) -> str:
        """The prompt, or what the user said last."""

    async def find(self, name: str) -> T:
        """The model that is called so."""

    async def begin(self, model: T, tokens: int) -> Beginning[T]:
        """The first so many tokens of the likeliest answer of `model`, or all if it ends before."""


class PassedOn(Protocol[T_co]):
    """A request that was passed on."""

    @property
    def model(self) -> T_co:
        """Who answers, as it was found."""

    @property
    def mark(self) -> str:
        """Of who answers, see `mark`."""

    @property
    def warning(self) -> str | None:
        """Why it is not the one that should."""

    @property
    def spent_s(self) -> float:
        """Since the request came."""

    def answer(self, pieces: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """`pieces`, whose end is counted."""


class Router(Protocol):
    """What chooses who answers."""

    name: str
    created: int

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer together that whoever answers takes."""

    async def pass_on(self, asked: Asked[T], answered_by: str | None = None) -> PassedOn[T]:
        """Choose who answers what is `asked`, and find it; the one with the mark `answered_by`, if there is one.

        Raises RequestError where nobody can.
        """


def mark(model: str) -> str:
    """By which a model's name is known again."""
    return f"{zlib.crc32(model.encode()):08x}"
