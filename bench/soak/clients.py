"""Clients that never do the same twice: names come and go, some leave early, some read slowly, some are wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count

import httpx
import numpy as np

from pliant.bench.images import base64_png

ADAPTERS = ("asyncio-32", "decimal-128", "email-16", "logging-8", "unittest-64")
TASKS = ("at-least-five", "digit", "parity")
TEXTS, CHATS, IMAGES = "topics-small", "chat", "digits"
_ANSWERS_WITHIN_S = 120.0


class Clients:
    """Of the gateway at `address`. Adapters and tasks are loaded from folders that the gateway knows by their names."""

    def __init__(self, address: str, seed: int) -> None:
        self.statuses: Counter[str] = Counter()
        """What came of all that was sent."""
        self._rng = random.Random(seed)
        self._numbers = count()
        self._http = httpx.AsyncClient(base_url=address, timeout=_ANSWERS_WITHIN_S)

    async def run(self) -> None:
        """Until cancelled."""
        kinds: tuple[Callable[[], Awaitable[None]], ...] = (
            *(self._texts, self._chat, self._leave, self._read_slowly),
            *(self._adapter, self._task, self._image, self._wrong),
        )
        async with self._http, asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(self._repeat(kind))

    async def _repeat(self, kind: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await kind()
            except httpx.TransportError as error:
                self.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.02)

    async def _texts(self) -> None:
        words = " ".join(f"w{self._rng.randrange(10**6)}" for _ in range(self._rng.randint(1, 60)))
        await self._post(f"/models/{TEXTS}", {"inputs": words})

    async def _chat(self) -> None:
        await self._post("/v1/completions", self._prompt(CHATS))

    async def _leave(self) -> None:
        async with self._http.stream("POST", "/v1/completions", json={**self._prompt(CHATS), "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
        self.statuses["left"] += 1

    async def _read_slowly(self) -> None:
        async with self._http.stream("POST", "/v1/completions", json={**self._prompt(CHATS), "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                await asyncio.sleep(0.1)
        self.statuses["read slowly"] += 1

    async def _adapter(self) -> None:
        name = f"soak-{next(self._numbers)}"
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": self._rng.choice(ADAPTERS)})
        await self._post("/v1/completions", self._prompt(name))
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _task(self) -> None:
        name = f"soak-{next(self._numbers)}"
        address = f"/v2/repository/models/{IMAGES}/tasks/{name}"
        await self._post(f"{address}/load", {"parameters": {"path": self._rng.choice(TASKS)}})
        await self._post(f"/models/{IMAGES}", {"inputs": self._png(), "parameters": {"task": name}})
        await self._post(f"{address}/unload", {})

    async def _image(self) -> None:
        await self._post(f"/models/{IMAGES}", {"inputs": self._png(), "parameters": {"task": "digit"}})

    async def _wrong(self) -> None:
        name = f"nobody-{next(self._numbers)}"
        await self._post(f"/models/{name}", {"inputs": "a"})
        await self._post("/v1/completions", {"model": name, "prompt": "a"})
        await self._post(f"/models/{TEXTS}", {name: 1})
        await self._post(f"/v2/models/{IMAGES}/infer", {"inputs": [{"name": name}]})

    def _prompt(self, model: str) -> dict[str, object]:
        return {"model": model, "prompt": f"What is {self._rng.randrange(10**6)}?", "max_tokens": 24}

    def _png(self) -> str:
        pixels = np.array([[self._rng.randrange(256) for _ in range(8)] for _ in range(8)], np.uint8)
        return base64_png(pixels)

    async def _post(self, path: str, body: object) -> None:
        answer = await self._http.post(path, json=body, headers={"x-request-id": f"soak-{next(self._numbers)}"})
        self.statuses[str(answer.status_code)] += 1
