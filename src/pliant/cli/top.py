"""`pliant top`: the console in a terminal."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pliant.cli.terminal import console
from pliant.deployments.kinds import loaded
from pliant.deployments.serving.history import GOOD, MINUTE, MISSED, STEP_S, History, Past, troubles
from pliant.deployments.serving.panels import Bars, Chart, Flow, Panel, Stacks, number
from pliant.errors import PliantError

_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 24
"""Characters of a line over time: so many steps of the history."""
_EVENTS = 8
_REPLICAS = 30
"""Rows of a table, at most."""


def watch(url: str, service: str | None, rounds: int | None = None) -> None:
    """Show the cluster at `url`, or one of its services more closely, until interrupted or for so many `rounds`.

    Raises PliantError if it does not answer at first, or has no such service, perhaps any more.
    """
    history = History(loaded())
    with client(url) as http:
        stats = ask(http, url)
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                if service is not None and service not in stats["services"]:
                    raise PliantError(f"no service {service}; there are: {', '.join(stats['services'])}")
                history.record(time.time(), stats)
                live.update(screen(stats, history, service), refresh=True)
                if rounds is not None and (rounds := rounds - 1) == 0:
                    return
                time.sleep(STEP_S)
                try:
                    stats = ask(http, url)
                except PliantError as error:
                    live.update(Text(f"{error}; trying again", style="red"), refresh=True)


def client(url: str, trust: ssl.SSLContext | bool = True, within_s: float = 5.0) -> httpx.Client:
    """For the cluster at `url`, with the operator's key; what answers later than `within_s` seconds does not answer."""
    key = os.environ.get("PLIANT_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=within_s, verify=trust)


def ask(http: httpx.Client, url: str) -> Mapping[str, Any]:
    """What /stats of the cluster at `url` says. Raises PliantError, of which httpx's error is the cause."""
    try:
        response = http.get("/stats")
        if response.status_code in (401, 403):
            raise PliantError(f"{url} wants the key of a tenant that may observe, in PLIANT_API_KEY")
        found = response.raise_for_status().json()
    except httpx.HTTPError as error:
        raise PliantError(f"{url}/stats cannot be read: {error}") from error
    except ValueError:
        found = None
    if not isinstance(found, Mapping) or "services" not in found:
        raise PliantError(f"what answers at {url}/stats is not pliant; name the cluster's address with --url")
    return found


def screen(stats: Mapping[str, Any], history: History, service: str | None) -> RenderableType:
    """All that is shown now."""
    views = stats["services"]
    wrong = troubles(stats) + history.shortfalls()
    trouble = Text("; ".join(wrong), style="red") if wrong else Text("All services are ready.", style="green")
    if service is None:
        shown: RenderableType = _services(views, history)
    else:
        past = history.of(service)
        shown = Group(
            _chart(Chart("Requests per second", past.lines("requests/"))),
            *map(drawn, history.kinds[views[service]["kind"]].panels(views[service], past)),
        )
    events = islice(reversed(history.events), _EVENTS)
    lines = [
        Text(
            f"{time.strftime('%H:%M:%S', time.localtime(each.at))} {each.service or 'cluster'} {each.what}",
            style="red" if each.bad else "",
        )
        for each in events
    ]
    title = f"pliant, as gateway {stats['gateway']} sees it"
    return Group(
        Rule(title), trouble, Text(""), shown, Rule("events"), *(lines or [Text("none since this was started")])
    )


def _services(views: Mapping[str, Any], history: History) -> Table:
    table = Table("service", "kind", "state", "replicas", "answers/s", "in time", "refused or failed/s", "", box=None)
    for name, view in views.items():
        past = history.of(name)
        good, missed = (_sum(past, outcomes) for outcomes in (GOOD, MISSED))
        share = past.attained(MINUTE)
        table.add_row(
            name,
            view["kind"],
            Text(view["state"], style="green" if view["ready"] else "yellow", overflow="ellipsis", no_wrap=True),
            str(len(view["replicas"])),
            f"{good[-1]:.4g}",
            "" if share is None else f"{share:.1%}",
            Text(f"{missed[-1]:.4g}", style="red" if missed[-1] else ""),
            Text(line(good), style="green"),
        )
    return table


def _sum(past: Past, outcomes: Sequence[str]) -> list[float]:
    return [sum(each) for each in zip(*(past.line(f"requests/{outcome}") for outcome in outcomes), strict=True)]


def line(values: Sequence[float]) -> str:
    """The latest values as blocks, the highest of them full."""
    shown = values[-_WIDTH:]
    most = max(shown, default=0.0) or 1.0
    return "".join(_BLOCKS[round(max(0.0, value) / most * (len(_BLOCKS) - 1))] for value in shown)


def drawn(panel: Panel) -> RenderableType:
    """A panel in characters."""
    if isinstance(panel, Chart):
        return _chart(panel)
    if isinstance(panel, Stacks):
        return _stacks(panel)
    if isinstance(panel, Flow):
        panel = Bars(panel.title, panel.shares, unit="%", most=1.0)
    if isinstance(panel, Bars):
        return _rows(panel.title, _bars(panel))
    table = Table(*map(str, panel.columns), title=panel.title, title_justify="left", box=None)
    for row in islice(panel.rows, _REPLICAS):
        table.add_row(*(each if isinstance(each, str) else number(each) for each in row))
    return table


def _chart(chart: Chart) -> RenderableType:
    return _rows(
        chart.title, ((name, number(values[-1], chart.unit), line(values)) for name, values in chart.lines.items())
    )


def _bars(panel: Bars) -> Iterator[tuple[str, str, str]]:
    most = panel.most or max(panel.bars.values(), default=0.0) or 1.0
    for name, value in panel.bars.items():
        yield name, number(value, panel.unit), "█" * round(min(1.0, value / most) * _WIDTH)


def _stacks(panel: Stacks) -> RenderableType:
    """The parts in words: a bar in one colour could not tell them apart."""
    return _rows(
        panel.title,
        (
            (name, ", ".join(f"{part} {number(value, panel.unit)}" for part, value in parts.items()), "")
            for name, parts in panel.rows.items()
        ),
    )


def _rows(title: str, rows: Iterator[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    for name, value, drawn in rows:
        table.add_row(name, value, Text(drawn, style="green"))
    return table
