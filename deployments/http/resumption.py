"""Streams of a language model that go on where they broke off, in whichever gateway.

Each event of a stream of one answer has an id, which says how much of the answer the client has once it has read the
event. Whoever sends the same request with this id as `Last-Event-ID` gets the rest. Nobody keeps answers for this: the
answer is computed again, and what was delivered is left out. So it must be the same answer, as it is without
temperature, with a seed, or with the same `x-request-id`, of which the seed is made where none is given. The id has a
checksum of the text: an answer that comes out differently is never put together of two.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from starlette.requests import Request

from pliant.deployments.llm.request import Piece
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

Pieces = AsyncGenerator[tuple[int, Piece], None]

_ID = re.compile(r"(\d{1,9})\.(\d{1,9})\.([0-9a-f]{8})(?:\.([0-9a-f]{8}))?")


class Delivered(NamedTuple):
    """How much of an answer a client has."""

    tokens: int = 0
    characters: int = 0
    checksum: int = 0
    """CRC-32 of the text."""
    mark: str = ""
    """Of whom a route had answer, see `prompts.mark`."""

    def __str__(self) -> str:
        return f"{self.tokens}.{self.characters}.{self.checksum:08x}" + (f".{self.mark}" if self.mark else "")

    def and_also(self, piece: Piece) -> Delivered:
        """With `piece`."""
        checksum = zlib.crc32(piece.text.encode(errors="surrogatepass"), self.checksum)
        return Delivered(self.tokens + len(piece.tokens), self.characters + len(piece.text), checksum, self.mark)


def last_event(request: Request, answers: int) -> Delivered | None:
    """How much the client says that it has; None if it has nothing. Raises RequestError if it makes no sense."""
    given = request.headers.get("last-event-id")
    if not given:
        return None
    if answers != 1:
        raise RequestError(Outcome.REJECTED, f"Last-Event-ID: got {answers} answers; only streams of one can go on")
    if not (match := _ID.fullmatch(given)):
        raise RequestError(Outcome.REJECTED, "Last-Event-ID: not the id of an event of this stream; leave it out")
    return Delivered(int(match[1]), int(match[2]), int(match[3], 16), match[4] or "")


def answered_by(request: Request) -> str | None:
    """The mark of whom a route had answer, if the client has a part of the answer."""
    match = _ID.fullmatch(request.headers.get("last-event-id", ""))
    return match[4] if match else None


def drawn(request: Request) -> tuple[str, int]:
    """A name for the answer to `request`, and a seed of 63 bits: the same for the same `x-request-id`."""
    given = request.headers.get("x-request-id")
    digest = hashlib.sha256(given.encode("latin-1")).digest() if given else secrets.token_bytes(32)
    return digest[8:24].hex(), int.from_bytes(digest[:8]) >> 1


async def rest(pieces: Pieces, after: Delivered, skipped: Callable[[Piece], object]) -> Pieces:
    """What of the one answer in `pieces` comes after what was delivered; the other parts go to `skipped`.

    Raises RequestError before anything else if this is another answer.
    """
    seen = Delivered()
    async with aclosing(pieces):
        async for index, piece in pieces:
            had, new = _split(piece, after.tokens - seen.tokens, after.characters - seen.characters)
            seen = seen.and_also(had)
            skipped(had)
            if new.tokens or new.text or new.finish:
                if (seen.characters, seen.checksum) != (after.characters, after.checksum) or (
                    piece.finish and seen.tokens < after.tokens
                ):
                    raise _another_answer()
                yield index, new


def _another_answer() -> RequestError:
    return RequestError(
        Outcome.REJECTED,
        "Last-Event-ID: this time the answer is another one, so it cannot go on; ask again from the start "
        "(the same request gives the same answer with temperature 0, a seed, or the same x-request-id)",
        fault=Fault.CONFLICT,
    )


def _split(piece: Piece, tokens: int, characters: int) -> tuple[Piece, Piece]:
    """The parts of `piece` before and after so many tokens and characters of it. What is said once is in the first."""
    tokens, characters = max(0, tokens), max(0, characters)
    rows = piece.logprobs
    return (
        piece._replace(
            tokens=piece.tokens[:tokens], text=piece.text[:characters], logprobs=rows and rows[:tokens], finish=None
        ),
        Piece(piece.tokens[tokens:], piece.text[characters:], rows and rows[tokens:], piece.finish),
    )
