"""What nobody waits for is computed while nobody waits, makes way at once, and says the same as undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from support.scripted import TOKENIZER, said, token

from pliant.deployments.llm.precedence import Precedence
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.policies.llm.decode_admission import QueueFullError
from pliant.sampling import Sampling

pytestmark = pytest.mark.virtual_time


class Engine:
    """Gives each answer a token per tenth of a second."""

    def __init__(self) -> None:
        self.has: list[str] = []
        self.begun: list[tuple[str, int]] = []
        """Which it got, and with how many tokens."""
        self.fails = False

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece | None, None]:
        self.has.append(generation.id)
        self.begun.append((generation.id, len(generation.generated)))
        try:
            for index in range(len(generation.generated), generation.max_tokens):
                if self.fails:
                    raise QueueFullError("full", 1)
                await asyncio.sleep(0.1)
                chosen = token(generation, index)
                finish = "length" if index + 1 == generation.max_tokens else None
                yield Piece((chosen,), str(TOKENIZER.decode([chosen])), None, finish)  # type: ignore[arg-type]
        finally:
            self.has.remove(generation.id)


def asked(name: str, tokens: int = 20, background: bool = False) -> Generation:
    return Generation(name, (1, 2), tokens, Sampling(temperature=0), background=background)


async def answer(precedence: Precedence, generation: Generation) -> str:
    return merged([piece async for piece in precedence.generate(generation) if piece]).text


async def test_who_is_waited_for_comes_first_and_the_others_go_on_later() -> None:
    engine = Engine()
    precedence = Precedence(engine.generate)
    behind = [asked(f"b{number}", background=True) for number in range(3)]
    tasks = [asyncio.create_task(answer(precedence, each)) for each in behind]
    await asyncio.sleep(0.55)
    assert sorted(engine.has) == ["b0", "b1", "b2"]
    live = asyncio.create_task(answer(precedence, asked("live", 10)))
    await asyncio.sleep(0.01)
    assert engine.has == ["live"]
    assert await live == said(asked("live", 10))
    assert not engine.has, "somebody may come again"
    assert await asyncio.gather(*tasks) == [said(each) for each in behind]
    assert [begun for begun in engine.begun if begun[0] == "b0"] == [("b0", 0), ("b0", 5)]


async def test_signs_of_life_come_while_somebody_is_there() -> None:
    precedence = Precedence(Engine().generate)
    live = asyncio.create_task(answer(precedence, asked("live", 60)))
    await asyncio.sleep(0)
    pieces = [piece async for piece in precedence.generate(asked("b", 3, background=True))]
    assert live.done()
    assert pieces.count(None) == 3
    assert [piece.finish for piece in pieces if piece] == [None, None, "length"]


async def test_an_error_is_passed_on_and_who_leaves_is_left() -> None:
    engine = Engine()
    precedence = Precedence(engine.generate)
    leaving = asyncio.create_task(answer(precedence, asked("b", background=True)))
    await asyncio.sleep(0.35)
    assert engine.has == ["b"]
    leaving.cancel()
    await asyncio.wait((leaving,))
    await asyncio.sleep(0)
    assert not engine.has
    engine.fails = True
    with pytest.raises(QueueFullError):
        await answer(precedence, asked("c", background=True))
