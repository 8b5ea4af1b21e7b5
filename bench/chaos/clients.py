"""Clients that go on whatever happens, and know what the answer is: of short texts, of streams, and of loads."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

TEXTS, CHAT, IMAGES = "topics-small", "chat", "digits"
ADAPTER = "logging-8"
"""A folder from which clients load."""
_SLO_MS = 2000
_LATE_S = 5.0
"""Of a whole request; streams are slower on a busy machine."""
_TRIES_FOR_S = 30.0
"""A load is asked for again, as its answer says, and a stream goes on, as its last id says."""
_GIVES_UP_S = 90.0
_STREAM = {"model": CHAT, "prompt": "The try statement", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
_TEXT = {"inputs": "Return a copy of the string", "parameters": {"slo_ms": _SLO_MS, "top_k": 1}}


class End(NamedTuple):
    """Of one request."""

    kind: str
    how: str
    """ok, shed (429), lost, or wrong."""
    began: float
    """By time.monotonic, as is what follows."""
    ended: float
    what: str
    """The status, or what was raised."""

    @property
    def late(self) -> bool:
        return self.how == "ok" and self.ended - self.began > _LATE_S

    @property
    def bad(self) -> bool:
        """Whether the client noticed that something was wrong."""
        return self.how in ("lost", "wrong") or self.late


class _LostError(Exception):
    """No answer, and why."""


@dataclass
class Clients:
    """Of the cluster at `address`; `expected` is what each kind answers where nothing breaks."""

    address: str
    expected: dict[str, Any] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def kinds(self) -> dict[str, Callable[[httpx.AsyncClient], Awaitable[Any]]]:
        """Each gives what was answered."""
        return {"short SLO": self._text, "stream": self._stream, "load call": self._load, "image": self._image}

    async def learn(self) -> None:
        """What is right. Raises whatever goes wrong."""
        async with self._http() as http:
            for kind, ask in self.kinds.items():
                self.expected[kind] = await ask(http)

    async def run(self) -> None:
        """Until cancelled: two of each kind, one of loads."""
        async with asyncio.TaskGroup() as group:
            for kind, ask in self.kinds.items():
                for _ in range(1 if kind == "load call" else 2):
                    group.create_task(self._repeat(kind, ask))

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.address, timeout=_GIVES_UP_S)

    async def _repeat(self, kind: str, ask: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> None:
        async with self._http() as http:
            while True:
                began = time.monotonic()
                how, what = await self._asked(kind, ask, http)
                self.ends.append(End(kind, how, began, time.monotonic(), what))
                await asyncio.sleep(0.1)

    async def _asked(
        self, kind: str, ask: Callable[[httpx.AsyncClient], Awaitable[Any]], http: httpx.AsyncClient
    ) -> tuple[str, str]:
        try:
            found = await ask(http)
        except _LostError as error:
            return ("shed" if str(error).startswith("429") else "lost"), str(error)[:200]
        except httpx.TransportError as error:
            return "lost", repr(error)
        return ("ok", "200") if found == self.expected[kind] else ("wrong", str(found)[:200])

    async def _text(self, http: httpx.AsyncClient) -> Any:
        [[answer]] = _answered(await http.post(f"/models/{TEXTS}", json=_TEXT))
        return answer["label"]

    async def _image(self, http: httpx.AsyncClient) -> Any:
        body = {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": [7] * 192}]}
        given = {**body, "parameters": {"task": "digit", "slo_ms": _SLO_MS}}
        answer = _answered(await http.post(f"/v2/models/{IMAGES}/infer", json=given))
        return [output["shape"] for output in answer["outputs"]]

    async def _stream(self, http: httpx.AsyncClient) -> Any:
        """The whole text; after a break it goes on behind the last event."""
        text, last, until = "", "", time.monotonic() + _TRIES_FOR_S
        headers = {"x-request-id": f"chaos-{next(self._numbers)}"}
        while True:
            try:
                more = {**headers, **({"Last-Event-ID": last} if last else {})}
                async with http.stream(
                    "POST", "/v1/completions", json={**_STREAM, "stream": True}, headers=more
                ) as got:
                    if got.status_code != 200:
                        raise _LostError(f"{got.status_code} {(await got.aread()).decode()}")
                    coming = ""
                    async for line in got.aiter_lines():
                        name, _, value = line.partition(": ")
                        if name == "data" and value == "[DONE]":
                            return text
                        if name == "data":
                            coming = _piece(value)
                        elif name == "id":
                            last = value
                        elif not line:
                            text, coming = text + coming, ""
            except (httpx.TransportError, _LostError):
                if time.monotonic() > until:
                    raise
            if time.monotonic() > until:
                raise _LostError("the stream broke off, and could not go on")
            await asyncio.sleep(0.5)

    async def _load(self, http: httpx.AsyncClient) -> Any:
        """Load an adapter, ask it, unload it; once it is acknowledged it is there."""
        name = f"chaos-{next(self._numbers)}"
        await self._insist(http, "/v1/load_lora_adapter", lora_name=name, lora_path=ADAPTER, load_inplace=True)
        answer = await http.post("/v1/completions", json={**_STREAM, "model": name, "max_tokens": 4})
        await self._insist(http, "/v1/unload_lora_adapter", lora_name=name)
        return _answered(answer)["choices"][0]["text"]

    async def _insist(self, http: httpx.AsyncClient, path: str, **body: Any) -> None:
        """Send it again while the answer says that it may come about later."""
        until = time.monotonic() + _TRIES_FOR_S
        while True:
            try:
                answer = await http.post(path, json=body)
                if answer.status_code == 200 or (answer.status_code == 404 and "unload" in path):
                    return
                if answer.status_code != 503 or time.monotonic() > until:
                    _answered(answer)
            except httpx.TransportError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.5)


def _piece(data: str) -> str:
    """The text of an event of a stream. Raises _LostError if it is an error."""
    event = json.loads(data)
    if "choices" not in event:
        raise _LostError(data)
    return str(event["choices"][0]["text"])


def _answered(answer: httpx.Response) -> Any:
    if answer.status_code != 200:
        raise _LostError(f"{answer.status_code} {answer.text}")
    return answer.json()
