"""What a language model's replica makes of its engine's errors, without Ray and without a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pliant.deployments.llm.engine import BrokenError
from pliant.deployments.llm.loop import StandstillError
from pliant.deployments.llm.messages import Refusal, Ticket
from pliant.deployments.llm.replica import LlmReplica
from pliant.deployments.llm.request import Generation, Piece
from pliant.policies.decode_admission import LateError
from pliant.sampling import Sampling

TICKET = Ticket("r", "gateway", Generation("g", (1, 2, 3), 7, Sampling()))
PIECE = Piece((5,), "a")


class Loop:
    """An engine's loop that yields a piece and then raises, or goes on for ever."""

    failure: Exception | None = None
    seconds = 0.0
    closed = False

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def generate(self, _generation: Generation) -> AsyncGenerator[Piece, None]:
        try:
            yield PIECE
            if self._error:
                raise self._error
            await asyncio.Event().wait()
        finally:
            self.closed = True

    def stepping_s(self) -> float:
        return self.seconds

    def close(self) -> None: ...


def replica(loop: Loop) -> Any:
    made: Any = LlmReplica.__new__(LlmReplica)
    made._service, made._held, made._loop, made._hangs_after_s = "chat", Counter(), loop, 60
    return made


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (LateError("too late", 2.5), [Refusal("too late", 2.5)]),
        (ValueError("too long"), [Refusal("too long", None)]),
        (BrokenError("no memory"), []),
        (StandstillError("60 s"), []),
    ],
)
async def test_errors_are_told_in_plain_data(error: Exception, last: list[Refusal]) -> None:
    made = replica(Loop(error))
    assert [item async for item in made.generate(TICKET)] == [PIECE, *last]
    assert made._held == {}


async def test_live_tokens_are_held_until_the_gateway_leaves() -> None:
    loop = Loop()
    made = replica(loop)
    answers = [made.generate(TICKET), made.generate(TICKET._replace(gateway="another"))]
    for answer in answers:
        assert await anext(answer) == PIECE
    assert made._held == {"gateway": 10, "another": 10}
    await answers[0].aclose()
    assert made._held == {"another": 10}
    assert loop.closed
    await answers[1].aclose()
    assert made._held == {}


async def test_health() -> None:
    loop = Loop()
    made = replica(loop)
    await made.check_health()
    loop.seconds = 61
    with pytest.raises(RuntimeError, match="one step has taken 61 s"):
        await made.check_health()
    loop.failure = BrokenError("no memory")
    with pytest.raises(BrokenError, match="no memory"):
        await made.check_health()
