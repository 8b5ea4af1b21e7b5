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
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from pliant.deployments.http.console.charts import draw
from pliant.deployments.http.places import CONSOLE, CONSOLE_STREAM
from pliant.deployments.serving.history import FAILED, GOOD, MINUTE, MISSED, REFUSED, Event, History, Past, troubles
from pliant.deployments.serving.panels import Chart, Panel, number
from pliant.deployments.serving.plans import shares
from pliant.deployments.serving.tenants import current

_EVERY_S = 1.0
_EVENTS_SHOWN = 30
_GZIP = 16 + zlib.MAX_WBITS
_DETAILED = 8
"""Services of which a viewer sees everything at once. Of clusters with more, whoever wants another one's names it."""


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
        self._made: dict[str, Mapping[str, str]] = {}
        """By the service that is wanted; none: the first ones."""

    def sections(self, service: str = "") -> Mapping[str, str]:
        """HTML, at most a second old: of `service` everything, or if there is none of that name of the first ones."""
        now = self._clock()
        if not 0 <= now - self._made_at < _EVERY_S:
            self._made_at, self._made = now, {}
        if service not in self._made:
            self._made[service] = dict(self._make(now, service))
        return self._made[service]

    async def changes(self, service: str = "") -> AsyncIterator[str]:
        """Server-sent events, each a JSON object of the sections that have changed, the first of all, for ever."""
        seen: dict[str, str] = {}
        while True:
            sections = self.sections(service)
            changed = {name: html for name, html in sections.items() if seen.get(name) != html}
            seen = {**sections}
            yield f"data: {json.dumps(changed)}\n\n" if changed else ": nothing new\n\n"
            await asyncio.sleep(_EVERY_S)

    def _make(self, now: float, service: str) -> Iterator[tuple[str, str]]:
        stats = self._stats()
        views: Mapping[str, Mapping[str, Any]] = stats["services"]
        pasts = {name: self._history.of(name) for name in views}
        yield "trouble", _trouble(troubles(stats) + self._history.shortfalls())
        yield "now", "".join(_tiles(stats, views, pasts))
        yield "services", _overview(views, pasts)
        yield "budget", "".join(map(draw, _budget(views, pasts)))
        for name in (service,) if service in views else islice(views, _DETAILED):
            yield f"service-{name}", self._service(name, views[name], pasts[name])
        yield "events", _events(now, list(self._history.events)[-_EVENTS_SHOWN:])
        yield "try", _forms(views, {name: self._history.kinds[view["kind"]].answers for name, view in views.items()})

    def _service(self, name: str, view: Mapping[str, Any], past: Past) -> str:
        outcomes = Chart("Requests per second", past.lines("requests/"), stacked=True)
        panels = [outcomes, *self._history.kinds[view["kind"]].panels(view, past)]
        mark = "good" if view["ready"] else "bad"
        head = f"<h2>{escape(name)} <small>{escape(view['kind'])}</small></h2>"
        state = f'<p class="{mark}">{escape(view["state"])}</p>'
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
    async def console_stream(request: Request, service: str = "") -> StreamingResponse:
        """What the page shows, as server-sent events; for the page alone, so its form may change."""
        current().check("observe")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        changes = console.changes(service)
        packs = "gzip" in request.headers.get("accept-encoding", "")
        if packs:
            headers["Content-Encoding"] = "gzip"
        return StreamingResponse(
            _gzipped(changes) if packs else changes, media_type="text/event-stream", headers=headers
        )

    return routes


async def _gzipped(events: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Each can be read as soon as it came."""
    packer = zlib.compressobj(1, wbits=_GZIP)
    async for event in events:
        yield packer.compress(event.encode()) + packer.flush(zlib.Z_SYNC_FLUSH)


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


def _trouble(wrong: Sequence[str]) -> str:
    """One sentence on what is wrong, if something is."""
    if not wrong:
        return '<p class="good">All services are ready.</p>'
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f'<p class="bad">{escape(wrong[0][:1].upper() + wrong[0][1:])}{more}.</p>'


def _tiles(stats: Mapping[str, Any], views: Mapping[str, Any], pasts: Mapping[str, Past]) -> Iterator[str]:
    """The last minute in numbers."""
    good, refused, failed = (
        sum(_mean(past, outcomes) for past in pasts.values()) for outcomes in (GOOD, REFUSED, FAILED)
    )
    asked = good + refused + failed
    running = sum(len(view["replicas"]) for view in views.values())
    yield _tile("in time", f"{good / asked:.1%}" if asked else "none asked")
    yield _tile("answers per second", number(good))
    yield _tile("refused per second", number(refused))
    yield _tile("failed per second", number(failed))
    yield _tile("replicas", str(running))
    gateways = max((len(view["requests_by_gateway"]) for view in views.values()), default=1)
    yield _tile("gateway", f"{stats['gateway']}, 1 of {gateways}")


def _tile(what: str, value: str) -> str:
    return f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>"


def _overview(views: Mapping[str, Mapping[str, Any]], pasts: Mapping[str, Past]) -> str:
    """The last minute of each service in one line."""
    columns = ("service", "kind", "in time", "answers/s", "refused or failed/s", "state")
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = []
    for name, view in views.items():
        share, good, missed = pasts[name].attained(MINUTE), _mean(pasts[name], GOOD), _mean(pasts[name], MISSED)
        link = f'<a href="#service-{escape(name)}">{escape(name)}</a>'
        cells = f"<td>{escape(view['kind'])}</td><td>{'' if share is None else f'{share:.1%}'}</td>"
        cells += f'<td>{number(good)}</td><td class="{"bad" if missed else ""}">{number(missed)}</td>'
        mark = "good" if view["ready"] else "bad"
        rows.append(f'<tr><th scope="row">{link}</th>{cells}<td class="{mark}">{escape(view["state"])}</td></tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    title = "Services, in the last minute"
    return (
        f'<figure class="whole"><figcaption>{title}</figcaption>'
        f'<div class="wide" tabindex="0" role="region" aria-label="{title}">{table}</div></figure>'
    )


def _mean(past: Past, outcomes: Sequence[str]) -> float:
    """Requests per second of the last minute that ended so."""
    return sum(sum(past.line(f"requests/{outcome}")[-MINUTE:]) for outcome in outcomes) / MINUTE


def _budget(views: Mapping[str, Mapping[str, Any]], pasts: Mapping[str, Past]) -> Iterator[Panel]:
    """Who holds what there is; where it is shared out, why."""
    gpus = {name: past.line("gpus") for name, past in pasts.items()}
    if any(any(line) for line in gpus.values()):
        yield Chart("GPUs, by the service that holds them", gpus, stacked=True)
    replicas = {name: past.line("replicas") for name, past in pasts.items()}
    yield Chart("Replicas that run, by service", replicas, stacked=True)
    shared = shares(views)
    if shared.rows:
        yield shared


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
