"""The console: a page for operators, of what this gateway sees, which follows it by itself.

The page has no data in it, and nothing of other servers. Its sections come as server-sent events, as HTML, each when it
has changed; they are made once a second however many look. With keys the page asks for one that has the right
`observe`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, StreamingResponse

from pliant.deployments.http.console.charts import draw
from pliant.deployments.http.places import CONSOLE, CONSOLE_STREAM
from pliant.deployments.serving.history import GOOD, MISSED, STEP_S, Event, History, Past, troubles
from pliant.deployments.serving.panels import Chart, number
from pliant.deployments.serving.tenants import current

_EVERY_S = 1.0
_MINUTE = round(60 / STEP_S)
_EVENTS_SHOWN = 30


class Console:
    """What viewers of one gateway see: sections, by id, in order."""

    def __init__(
        self,
        stats: Callable[[], Mapping[str, Any]],
        history: History,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stats = stats
        self._history = history
        self._clock = clock
        self._made_at = 0.0
        self._made: dict[str, str] = {}

    def sections(self) -> Mapping[str, str]:
        """HTML, at most a second old."""
        now = self._clock()
        if not 0 <= now - self._made_at < _EVERY_S:
            self._made_at, self._made = now, dict(self._make(now))
        return self._made

    async def changes(self) -> AsyncIterator[str]:
        """Server-sent events, each a JSON object of the sections that have changed, for ever."""
        seen: dict[str, str] = {}
        while True:
            sections = self.sections()
            changed = {name: html for name, html in sections.items() if seen.get(name) != html}
            seen = {**sections}
            yield f"data: {json.dumps(changed)}\n\n" if changed else ": nothing new\n\n"
            await asyncio.sleep(_EVERY_S)

    def _make(self, now: float) -> Iterator[tuple[str, str]]:
        stats = self._stats()
        views: Mapping[str, Mapping[str, Any]] = stats["services"]
        pasts = {name: self._history.of(name) for name in views}
        yield "trouble", _trouble(stats)
        yield "now", "".join(_tiles(stats, views, pasts))
        lines = {name: past.line("replicas") for name, past in pasts.items()}
        yield "budget", draw(Chart("Replicas that run", lines, stacked=True))
        for name, view in views.items():
            yield f"service-{name}", self._service(name, view, pasts[name])
        yield "events", _events(now, list(self._history.events)[-_EVENTS_SHOWN:])
        yield "try", _forms(views, {name: self._history.kinds[view["kind"]].answers for name, view in views.items()})

    def _service(self, name: str, view: Mapping[str, Any], past: Past) -> str:
        outcomes = Chart("Requests per second", past.lines("requests/"), stacked=True)
        panels = [outcomes, *self._history.kinds[view["kind"]].panels(view, past)]
        mark = "good" if view["ready"] else "bad"
        head = f"<h2>{escape(name)} <small>{escape(view['kind'])}</small></h2>"
        state = f'<p class="{mark}">{escape(view["state"])}{_attained(past)}</p>'
        return f'{head}{state}<div class="panels">{"".join(map(draw, panels))}</div>'


def router(console: Console) -> APIRouter:
    """The page, and what it follows."""
    routes = APIRouter()
    page, policy = _page()

    @routes.get(CONSOLE, include_in_schema=False)
    async def console_page() -> HTMLResponse:
        """A page for operators: what the cluster does, and why."""
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})

    @routes.get(CONSOLE_STREAM, include_in_schema=False)
    async def console_stream() -> StreamingResponse:
        """What the page shows, as server-sent events; for the page alone, so its form may change."""
        current().check("observe")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(console.changes(), media_type="text/event-stream", headers=headers)

    return routes


def _page() -> tuple[str, str]:
    """The page, and what browsers are to allow it."""
    folder = files(__package__)
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("console.css", "console.js"))
    page = (folder / "console.html").read_text(encoding="utf-8")
    page = page.replace("/*style*/", style).replace("/*script*/", script)
    allowed = {"script-src": script, "style-src": style}
    hashes = " ".join(f"; {what} 'sha256-{_digest(text)}'" for what, text in allowed.items())
    return page, f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'{hashes}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _trouble(stats: Mapping[str, Any]) -> str:
    """One sentence on what is wrong, if something is."""
    wrong = troubles(stats)
    if not wrong:
        return '<p class="good">All services are ready.</p>'
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f'<p class="bad">{escape(wrong[0][:1].upper() + wrong[0][1:])}{more}.</p>'


def _tiles(stats: Mapping[str, Any], views: Mapping[str, Any], pasts: Mapping[str, Past]) -> Iterator[str]:
    """The last minute in numbers."""
    good, missed = (
        sum(sum(past.line(f"requests/{outcome}")[-_MINUTE:]) for past in pasts.values() for outcome in outcomes)
        for outcomes in (GOOD, MISSED)
    )
    running = sum(len(view["replicas"]) for view in views.values())
    yield _tile("in time", f"{good / (good + missed):.1%}" if good + missed else "none asked")
    yield _tile("answers per second", number(good / _MINUTE))
    yield _tile("refused or failed per second", number(missed / _MINUTE))
    yield _tile("replicas", str(running))
    gateways = max((len(view["requests_by_gateway"]) for view in views.values()), default=1)
    yield _tile("gateway", f"{stats['gateway']}, 1 of {gateways}")


def _tile(what: str, value: str) -> str:
    return f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>"


def _attained(past: Past) -> str:
    share = past.attained(_MINUTE)
    return "" if share is None else f"; {share:.1%} in time in the last minute"


def _events(now: float, events: list[Event]) -> str:
    rows = "".join(
        f'<li class="{"bad" if event.bad else ""}"><time>{time.strftime("%H:%M:%S", time.localtime(event.at))}</time> '
        f"<b>{escape(event.service or 'cluster')}</b> {escape(event.what)}</li>"
        for event in reversed(events)
    )
    return f"<h2>Events</h2><ul>{rows or '<li>none since this gateway started</li>'}</ul>"


def _forms(views: Mapping[str, Any], answers: Mapping[str, str]) -> str:
    options = "".join(
        f'<option value="{escape(name)}" data-answers="{escape(answers[name])}">{escape(name)}</option>'
        for name in views
    )
    return (
        '<h2>Try it</h2><form><label>Service <select name="service">' + options + "</select></label>"
        '<label class="for-texts for-prompts">Text <textarea name="text" rows="3"></textarea></label>'
        '<label class="for-prompts">Adapter, or nothing <input name="adapter" autocomplete="off"/></label>'
        '<label class="for-images">Image <input name="image" type="file" accept="image/*"/></label>'
        '<button>Send</button></form><pre aria-live="polite"></pre>'
    )
