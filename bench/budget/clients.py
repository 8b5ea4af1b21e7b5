"""Clients that wait for nobody, and what a cluster says of itself meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from pliant.bench.budget.devices import ACCURACY
from pliant.bench.budget.models import SIDE
from pliant.bench.budget.shift import ANSWER, CHAT, IMAGES, PROMPT, SERVICES, SLO_S, TEXTS, Asked
from pliant.bench.images import png
from pliant.bench.load import session

_LOOKS_EVERY_S = 0.5
_REFUSED = (429, 503, 504)
_TEXT = json.dumps({"inputs": "word " * 8}).encode()
_JSON = {"Content-Type": "application/json"}


class End(NamedTuple):
    """Of a request."""

    service: str
    at_s: float
    what: str
    """answered, refused, or how it was lost."""
    seconds: float
    """Until it was answered; of chat, until the first token."""
    worth: float
    """Of the answer, if it is in time."""

    @property
    def earned(self) -> float:
        return self.worth if self.what == "answered" and self.seconds <= SLO_S[self.service] else 0.0

    @property
    def lost(self) -> bool:
        """Neither answered, nor refused in a way that says when to come back."""
        return self.what not in ("answered", "refused")


class Look(NamedTuple):
    """At /stats."""

    at_s: float
    wanted: Mapping[str, int]
    answers: Mapping[str, Mapping[str, int]]
    """Of each replica that there is, by service."""
    because: Mapping[str, str]


@dataclass
class Seen:
    """What came of a load."""

    ends: list[End] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    lag_s: float = 0.0
    """By how much a client was late at most."""

    def attained(self) -> dict[str, float]:
        """By service: what its requests earned, of what they could."""
        earned = {name: [end.earned for end in self.ends if end.service == name] for name in SERVICES}
        return {name: sum(each) / len(each) for name, each in earned.items()}

    def lost(self) -> list[End]:
        return [end for end in self.ends if end.lost]


def new_place_s(looks: Sequence[Look], service: str, at_s: float) -> float:
    """Seconds from `at_s` until a replica answered that was not there then; infinite if none did."""
    before = [look for look in looks if look.at_s <= at_s]
    known = before[-1].answers[service].keys() if before else set()
    for look in looks:
        if any(count and name not in known for name, count in look.answers[service].items() if look.at_s > at_s):
            return look.at_s - at_s
    return float("inf")


def start_s(looks: Sequence[Look], service: str) -> float | None:
    """The median of the seconds from when more replicas were wanted until there were as many; None if none were."""
    found = []
    for before, look in itertools.pairwise(looks):
        if (wanted := look.wanted[service]) > before.wanted[service]:
            later = (each.at_s for each in looks if each.at_s >= look.at_s and len(each.answers[service]) >= wanted)
            found += [each - look.at_s for each in itertools.islice(later, 1)]
    return median(found) if found else None


def reasons(looks: Sequence[Look]) -> list[str]:
    """What changed, and why."""
    found = []
    for before, look in itertools.pairwise(looks):
        for name in SERVICES:
            if look.wanted[name] != before.wanted[name]:
                change = f"{name} {before.wanted[name]} → {look.wanted[name]}"
                found.append(f"{look.at_s:.0f} s: {change}: {look.because[name]}")
    return found


async def play(address: str, asked: Sequence[Asked], began: float) -> Seen:
    """Send each request at its time after `began`, by time.monotonic, and look at the cluster meanwhile."""
    seen = Seen()
    async with session() as http, asyncio.TaskGroup() as group:
        looking = group.create_task(_look_on(http, address, began, seen.looks))
        async with asyncio.TaskGroup() as clients:
            for number, each in enumerate(asked):
                if (wait_s := began + each.at_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                seen.lag_s = max(seen.lag_s, -wait_s)
                clients.create_task(_keep(http, address, each, number, seen.ends))
        looking.cancel()
    return seen


async def _keep(http: aiohttp.ClientSession, address: str, asked: Asked, number: int, ends: list[End]) -> None:
    ends.append(await ask(http, address, asked, number))


async def ask(http: aiohttp.ClientSession, address: str, asked: Asked, number: int) -> End:
    """One request; prompts differ by their `number`."""
    began, name = time.monotonic(), asked.service
    worth, answered_s = 1.0, 0.0
    try:
        async with _sent(http, address, name, number) as response:
            if response.status != 200:
                return End(name, asked.at_s, await _refused(response), time.monotonic() - began, 0.0)
            if name == CHAT:
                answered_s = await _first_token(response, began)
            else:
                answer = await response.json()
                worth = _worth(answer) if name == IMAGES else 1.0
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        return End(name, asked.at_s, repr(error)[:200], time.monotonic() - began, 0.0)
    return End(name, asked.at_s, "answered", answered_s or time.monotonic() - began, worth)


def _sent(http: aiohttp.ClientSession, address: str, service: str, number: int) -> Any:
    if service == TEXTS:
        return http.post(f"{address}/models/{TEXTS}", data=_TEXT, headers=_JSON)
    if service == IMAGES:
        return http.post(f"{address}/models/{IMAGES}", data=_png())
    body = {"model": CHAT, "prompt": f"{number:0{PROMPT}d}", "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
    return http.post(f"{address}/v1/completions", json=body)


@cache
def _png() -> bytes:
    return png(np.zeros((SIDE, SIDE, 3), np.uint8))


async def _refused(response: aiohttp.ClientResponse) -> str:
    if response.status in _REFUSED and "Retry-After" in response.headers:
        return "refused"
    return f"{response.status} {(await response.text())[:200]}"


async def _first_token(response: aiohttp.ClientResponse, began: float) -> float:
    """Seconds until it. Raises ValueError if the stream does not come to its end."""
    first_s, ended = 0.0, False
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            ended = True
        elif line.startswith(b"data: "):
            if "error" in json.loads(line[6:]):
                raise ValueError(f"the stream broke off: {line[:150]!r}")
            first_s = first_s or time.monotonic() - began
    if not ended:
        raise ValueError("the stream broke off")
    return first_s


def _worth(answer: list[dict[str, Any]]) -> float:
    return ACCURACY[answer[0]["gamma"]] if answer[0]["fate"] == "in_time" else 0.0


async def _look_on(http: aiohttp.ClientSession, address: str, began: float, looks: list[Look]) -> None:
    while True:
        async with http.get(f"{address}/stats") as response:
            views = (await response.json())["services"]
        looks.append(look(views, time.monotonic() - began))
        await asyncio.sleep(_LOOKS_EVERY_S)


def look(views: Mapping[str, Any], at_s: float) -> Look:
    """What `views`, of /stats, say."""
    return Look(
        at_s,
        {name: view["plan"].get("wanted_replicas", len(view["replicas"])) for name, view in views.items()},
        {
            name: {replica: _answers(report) for replica, report in view["replicas"].items()}
            for name, view in views.items()
        },
        {name: view["plan"].get("wanted_because", "") for name, view in views.items()},
    )


def _answers(report: Mapping[str, Any]) -> int:
    """That were at least begun."""
    return int(report.get("prompts", report["served"]))
