"""Draws what the console shows: panels as HTML with SVG, with everything in words, too, for screen readers.

What comes from outside, such as names of replicas, is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pliant.deployments.serving.history import STEPS
from pliant.deployments.serving.panels import Bars, Chart, Panel, Table

_HEIGHT = 60
"""Of a drawing, which is as many units wide as it has values."""
_COLOURS = 8
"""Classes c0, c1 ... of the style sheet."""
_MOST_ROWS = 50


def draw(panel: Panel) -> str:
    """A figure."""
    match panel:
        case Chart():
            return _chart(panel)
        case Bars():
            return _bars(panel)
        case Table():
            return _table(panel)


def number(value: float, unit: str = "") -> str:
    """In at most four digits, for people."""
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"
    if unit == "%":
        return f"{value:.1%}"
    text = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}" if unit else text


def _chart(chart: Chart) -> str:
    lines = {name: list(values) for name, values in chart.lines.items() if any(values)}
    if chart.stacked:
        top = max((sum(values) for values in zip(*lines.values(), strict=True)), default=0.0)
        drawn = _areas(lines, top)
    else:
        top = max((max(values) for values in lines.values()), default=0.0)
        drawn = [
            f'<polyline class="c{index % _COLOURS}" points="{_points(values, top)}"/>'
            for index, values in enumerate(lines.values())
        ]
    now = {name: number(values[-1], chart.unit) for name, values in lines.items()}
    words = ", ".join(f"{name} {value}" for name, value in now.items()) or "nothing yet"
    legend = "".join(
        f'<li class="c{index % _COLOURS}">{escape(name)} <b>{escape(value)}</b></li>'
        for index, (name, value) in enumerate(now.items())
    )
    svg = (
        f'<svg viewBox="0 0 {STEPS - 1} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{chart.title}: {words}")}">{"".join(drawn)}</svg>'
    )
    highest = f"<small>{escape(number(top, chart.unit))} at most, 15 min</small>" if lines else ""
    return _figure(chart.title, f"{svg}{highest}<ul>{legend or '<li>nothing yet</li>'}</ul>")


def _areas(lines: Mapping[str, Sequence[float]], top: float) -> list[str]:
    """What all lines up to each are together, so that it lies behind those before it."""
    drawn: list[str] = []
    sums = [0.0] * STEPS
    for index, values in enumerate(lines.values()):
        sums = [below + value for below, value in zip(sums, values, strict=True)]
        corners = f"{STEPS - 1},{_HEIGHT} 0,{_HEIGHT}"
        drawn.append(f'<polygon class="c{index % _COLOURS}" points="{_points(sums, top)} {corners}"/>')
    return drawn[::-1]


def _points(values: Sequence[float], top: float) -> str:
    """From left to right, without those that lie between equal ones."""
    heights = [round(_HEIGHT - 1 - (value / top if top else 0.0) * (_HEIGHT - 2)) for value in values]
    last = len(heights) - 1
    return " ".join(
        f"{index},{height}"
        for index, height in enumerate(heights)
        if index in (0, last) or not heights[index - 1] == height == heights[index + 1]
    )


def _bars(panel: Bars) -> str:
    most = panel.most or max(panel.bars.values(), default=0.0)
    rows = "".join(
        f"<li>{escape(name)} <b>{escape(number(value, panel.unit))}</b>"
        f'<meter min="0" max="{most or 1:g}" value="{min(value, most):g}">{escape(number(value))}</meter></li>'
        for name, value in panel.bars.items()
    )
    return _figure(panel.title, f'<ul class="bars">{rows or "<li>nothing yet</li>"}</ul>')


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(cell))}</td>' for cell in row)}</tr>" for row in table.rows[:_MOST_ROWS]
    )
    more = len(table.rows) - _MOST_ROWS
    note = f"<small>and {more} more: see /stats</small>" if more > 0 else ""
    body = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
    return _figure(table.title, body if table.rows else "<p>none</p>", "whole")


def _cell(cell: str | float) -> str:
    return cell if isinstance(cell, str) else number(cell)


def _figure(title: str, body: str, kind: str = "") -> str:
    return f'<figure class="{kind}"><figcaption>{escape(title)}</figcaption>{body}</figure>'
