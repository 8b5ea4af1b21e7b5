"""Answers batches in the background: in each gateway one of each tenant at a time, a few requests of each at a time.

That these keep nobody waiting is up to replicas, which hear that they are in the background. What is answered is
stored part by part, so that whoever takes a batch over, after a gateway died or was replaced, goes on behind that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

from pliant.deployments.serving.batches.store import (
    GOOD,
    PART_LINES,
    Batch,
    BatchStore,
    Progress,
    Status,
    lines_of,
)
from pliant.deployments.serving.outcome import RequestError

logger = logging.getLogger("pliant")

_AT_A_TIME = 8
"""Requests of a batch."""
_LOOK_EVERY_S = 5.0
"""For batches that nobody works on."""
_KEEP_EVERY_S = 2.0
"""While some are worked on, it is looked how far all are, and whether one was cancelled; every fifth time the lease is
renewed."""
_LEASE_EVERY = 5
_RETRY_S = (0.25, 5.0)
"""What a request waits that was refused, at first and at most."""
_AGAIN = (429, 503, 504)
"""Statuses of requests that are sent again, where that may help."""


class Reply(NamedTuple):
    """What a request was answered with."""

    status: int
    body: Any
    for_ever: bool = False
    """Whether the same request is refused however often it is sent."""


Request = Mapping[str, Any]
"""A line of a file of requests."""
Asks = Callable[[str, str, str, Mapping[str, Any]], Awaitable[Reply]]
"""Has a request answered in the background: its tenant, its name, path and body."""


class Runner:
    """The batches of `store`, as the gateway called `me` works on them."""

    def __init__(self, store: BatchStore, me: str) -> None:
        self.store = store
        self._me = me
        self._asks: Asks | None = None
        self._wake = asyncio.Event()
        self._seen: list[Progress] = []
        self._complaint = ""
        """The last one about the state."""
        self._mine: dict[str, Batch] = {}
        """By tenant."""

    def begin(self, asks: Asks) -> None:
        """From now on `run` works, and has requests answered by `asks`."""
        self._asks = asks
        self.wake()

    def wake(self) -> None:
        """There is something new."""
        self._wake.set()

    def facts(self) -> list[dict[str, Any]]:
        """For /stats: the batches that had not ended when this gateway last looked."""
        return [
            {
                "id": each.batch.id,
                "tenant": each.batch.owner,
                "status": each.status,
                "here": each.batch in self._mine.values(),
                "total": each.batch.total,
                "completed": each.completed,
                "failed": each.failed,
            }
            for each in self._seen
        ]

    async def run(self) -> None:
        """Work for ever, once it has begun."""
        while self._asks is None:
            await self._wake.wait()
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                async with self._patient("batches"):
                    for batch in await self.store.in_thread(self._take, set(self._mine)):
                        self._mine[batch.owner] = batch
                        group.create_task(self._turn(batch, self._asks))
                await self._rest(_KEEP_EVERY_S if self._mine else _LOOK_EVERY_S)

    async def _turn(self, batch: Batch, asks: Asks) -> None:
        """Work on `batch`, and let its tenant's next one come."""
        async with self._patient(batch.id):
            await self._work(batch, asks)
        del self._mine[batch.owner]
        self.wake()

    @asynccontextmanager
    async def _patient(self, what: str) -> AsyncIterator[None]:
        """What goes wrong within is in the log, and some seconds pass before it is tried again."""
        try:
            yield
        except OSError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("%s: the state cannot be used: %s; trying again", what, error)
            await asyncio.sleep(_LOOK_EVERY_S)
        except Exception:
            logger.exception("%s: failed; trying again", what)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _take(self, busy: set[str]) -> list[Batch]:
        """Of each tenant but those that are `busy`, the oldest batch that no other gateway works on."""
        self._seen = self.store.unfinished()
        taken: dict[str, Batch] = {}
        for batch, *_ in self._seen:
            if batch.owner not in busy and batch.owner not in taken and self.store.lease(batch, self._me):
                taken[batch.owner] = batch
        return list(taken.values())

    async def _work(self, batch: Batch, asks: Asks) -> None:
        """Get on with `batch` until it ends, or another gateway has it."""
        answering = asyncio.create_task(self._answer(batch, asks))
        keeping = asyncio.create_task(self._keep(batch))
        try:
            await asyncio.wait((answering, keeping), return_when=asyncio.FIRST_COMPLETED)
            end: Status | Literal["lost"] = "completed"
            if not answering.done():
                end = keeping.result()
            elif isinstance(answering.exception(), RequestError):
                end = "failed"
            else:
                answering.result()
        finally:
            for task in (answering, keeping):
                task.cancel()
            await asyncio.gather(answering, keeping, return_exceptions=True)
        if end != "lost":
            await self.store.in_thread(self.store.finish, batch, end)

    async def _keep(self, batch: Batch) -> Status | Literal["lost"]:
        """Hold the lease of `batch` as long as it is to be worked on; returns why it is not any more."""
        looks = 0
        while True:
            if await self.store.in_thread(self.store.is_cancelled, batch):
                return "cancelled"
            if self.store.now() >= batch.expires_at:
                return "expired"
            await asyncio.sleep(_KEEP_EVERY_S)
            looks += 1
            if looks % _LEASE_EVERY == 0 and not await self.store.in_thread(self.store.lease, batch, self._me):
                return "lost"

    async def _answer(self, batch: Batch, asks: Asks) -> None:
        """Raises RequestError if its file is gone."""
        content = await self.store.in_thread(self.store.content, batch.owner, batch.input_file_id)
        lines = lines_of(content)
        done = {part.first for part in await self.store.in_thread(self.store.parts, batch)}
        places = asyncio.Semaphore(_AT_A_TIME)
        async with asyncio.TaskGroup() as group:
            for first in range(0, len(lines), PART_LINES):
                if first in done:
                    continue
                async with places:  # so that no more parts are begun than are worked on
                    pass
                part = lines[first : first + PART_LINES]
                requests = await self.store.in_thread(_parsed, part)
                group.create_task(self._part(batch, first, requests, asks, places))

    async def _part(
        self, batch: Batch, first: int, requests: list[Request], asks: Asks, places: asyncio.Semaphore
    ) -> None:
        async def one(index: int, request: Request) -> tuple[str, bool]:
            async with places:
                return await _answered(f"{batch.id}-{first + index}", batch.owner, request, asks)

        found = await asyncio.gather(*(one(index, request) for index, request in enumerate(requests)))
        failed = sum(not good for _, good in found)
        await self.store.in_thread(self.store.add_part, batch, first, [line for line, _ in found], failed)


def _parsed(lines: Sequence[bytes]) -> list[Request]:
    return [json.loads(line) for line in lines]


async def _answered(name: str, owner: str, request: Request, asks: Asks) -> tuple[str, bool]:
    """What is written about one request, and whether it has an answer."""
    wait_s, most_s = _RETRY_S
    try:
        while True:
            reply = await asks(owner, name, request["url"], request["body"])
            if reply.status not in _AGAIN or reply.for_ever:
                break
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)
    except Exception as error:
        logger.exception("batches: the request %s has no answer that can be kept", name)
        message = f"internal error: {type(error).__name__}; see the log"
        return _line(name, request, None, {"code": "server_error", "message": message}), False
    response = {"status_code": reply.status, "request_id": name, "body": reply.body}
    return _line(name, request, response, None), reply.status == GOOD


def _line(name: str, request: Request, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    """Of a file of answers."""
    line = {"id": f"batch_req_{name}", "custom_id": request["custom_id"], "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"))
