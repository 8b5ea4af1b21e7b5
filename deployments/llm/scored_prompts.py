"""Answers to prompts of which the client wants to know how likely their tokens are.

They are computed for the first choice of a prompt alone, and come with its first piece.
"""

from __future__ import annotations

from contextlib import aclosing

from pliant.deployments.http.resumption import Pieces
from pliant.deployments.llm.request import Piece, TokenLogprobs
from pliant.deployments.serving.outcome import Outcome, RequestError


async def with_scores(pieces: Pieces, choices: int) -> Pieces:
    """`pieces` of so many choices of each prompt; the first piece of every choice has its prompt's log probabilities.

    The other choices wait for the first. Raises RequestError where they were not computed, as by a replica of an
    earlier version.
    """
    scores: dict[int, tuple[TokenLogprobs, ...]] = {}
    waiting: dict[int, list[tuple[int, Piece]]] = {}
    begun: set[int] = set()
    async with aclosing(pieces):
        async for index, piece in pieces:
            prompt, choice = divmod(index, choices)
            if prompt not in scores and choice:
                waiting.setdefault(prompt, []).append((index, piece))
                continue
            if prompt not in scores:
                if piece.prompt_logprobs is None:
                    reason = "the replica that answered does not compute log probabilities of prompts yet; ask again"
                    raise RequestError(Outcome.UNAVAILABLE, reason, 1.0)
                scores[prompt] = piece.prompt_logprobs
            for other, ready in [(index, piece), *waiting.pop(prompt, [])]:
                first = other not in begun
                begun.add(other)
                yield other, ready._replace(prompt_logprobs=scores[prompt] if first else None)


async def without_answers(pieces: Pieces) -> Pieces:
    """`pieces` of answers of one token each, without it: what is left is what was said of the prompts."""
    async with aclosing(pieces):
        async for index, piece in pieces:
            logprobs = None if piece.logprobs is None else ()
            yield index, piece._replace(tokens=(), text="", logprobs=logprobs, finish=piece.finish and "length")
