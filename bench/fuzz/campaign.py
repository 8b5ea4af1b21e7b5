"""Sends requests one after another, and tells what each did to the gateway: its answer, its event loop, its memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pliant.bench.fuzz.bodies import Request
from pliant.deployments.http.statuses import speaks_openai

_BEAT_S = 0.002
_MOST_KEPT = 20


@dataclass
class Findings:
    """Of one block of requests."""

    requests: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    server_errors: list[str] = field(default_factory=list)
    """Statuses from 500 on, but 504: of an image, that the client's own slo_ms is too short. And what was raised."""
    undocumented: list[str] = field(default_factory=list)
    """Answers whose status, or whose error's shape, /openapi.json does not have."""
    leaks: list[str] = field(default_factory=list)
    """Answers that say where something lies on this machine."""
    blocked_s: float = 0.0
    """The longest time that the event loop did not come round, of which this process computed."""
    slowest: str = ""
    """What did that."""
    peak_mb: float = 0.0
    """By which memory was above what it was when a request was sent, at most."""
    largest: str = ""
    """What did that."""


class Campaign:
    """Of requests to `app`, whose files are in `folder`, in the event loop of `runner`."""

    def __init__(self, app: FastAPI, folder: Path, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._folder = str(folder).encode()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://pliant", timeout=None)
        self._paths = app.openapi()["paths"]

    def block(self, requests: st.SearchStrategy[Request], count: int, number: int) -> Findings:
        """Send `count` of `requests`; those of another `number` are others."""
        found = Findings()

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(requests)
        def send(request: Request) -> None:
            self._runner.run(self._send(request, found))

        memory_mb()  # as much as can be is given back, so that requests take memory anew
        send()
        return found

    async def _send(self, request: Request, found: Findings) -> None:
        beating = asyncio.create_task(_longest_pause(stop := asyncio.Event()))
        await asyncio.sleep(0)
        before_mb = _forget_peak()
        told = f"{request.method} {request.path[:80]} {request.body[:120]!r}... of {len(request.body)} bytes"
        try:
            answer = await self._http.request(
                request.method, request.path, content=request.body, headers=dict(request.headers)
            )
        except Exception as error:
            _keep(found.server_errors, f"{type(error).__name__}: {error}: {told}")
        else:
            self._look_at(answer, request, told, found)
        stop.set()
        blocked_s = await beating
        found.requests += 1
        if (peak_mb := _status_mb("VmHWM") - before_mb) > found.peak_mb:
            found.peak_mb, found.largest = peak_mb, told
        if blocked_s > found.blocked_s:
            found.blocked_s, found.slowest = blocked_s, told

    def _look_at(self, answer: httpx.Response, request: Request, told: str, found: Findings) -> None:
        status = answer.status_code
        found.statuses[status] = found.statuses.get(status, 0) + 1
        if status >= 500 and status != 504:
            _keep(found.server_errors, f"{status} {answer.text[:200]}: {told}")
        if self._folder in answer.content:
            _keep(found.leaks, f"{status} {answer.text[:200]}: {told}")
        operation = self._paths.get(request.route, {}).get(request.method.lower())
        if operation and not _documented(answer, operation, speaks_openai({"path": request.path})):
            _keep(found.undocumented, f"{status} {answer.text[:200]}: {told}")


def _documented(answer: httpx.Response, operation: Any, openai: bool) -> bool:
    if (told := operation["responses"].get(str(answer.status_code))) is None:
        return False
    if answer.headers.get("content-type", "").partition(";")[0] not in told.get("content", {"": "nothing"}):
        return False
    if answer.is_success:
        return True
    error = answer.json()["error"]
    return set(error) == {"message", "type", "param", "code"} if openai else isinstance(error, str)


async def _longest_pause(stop: asyncio.Event) -> float:
    """Until `stop`, the longest that the loop took to come round: of that, what this process computed meanwhile, as
    other processes may have had the machine."""
    longest = 0.0
    while not stop.is_set():
        at, computed = time.perf_counter(), time.process_time()
        await asyncio.sleep(_BEAT_S)
        pause = min(time.perf_counter() - at, time.process_time() - computed)
        longest = max(longest, pause)
    return longest


def _keep(where: list[str], what: str) -> None:
    if len(where) < _MOST_KEPT:
        where.append(what)


def memory_mb() -> float:
    """Of this process, once it has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss) / 2**20


def _forget_peak() -> float:
    """Have the kernel count the peak anew; the memory that there is."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mb("VmRSS")


def _status_mb(key: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) / 2**10
