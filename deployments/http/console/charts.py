"""Draws what the console shows: panels as HTML with SVG, with everything in words, too, for screen readers.

What comes from outside, such as names of replicas, is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pliant.deployments.serving.history import STEP_S
from pliant.deployments.serving.panels import Bars, Chart, Flow, Panel, Stacks, Table, number

_HEIGHT = 60
"""Of a drawing, which is as many units wide as it has steps."""
_WIDTH = 240
_GAP = 4
"""Of a diagram, and between its bands."""
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
        case Stacks():
            return _stacks(panel)
        case Flow():
            return _flow(panel)
        case Table():
            return _table(panel)


def _chart(chart: Chart) -> str:
    lines = {name: list(values) for name, values in chart.lines.items() if any(values)}
    last = max((len(values) for values in lines.values()), default=2) - 1
    if chart.stacked:
        top = max((sum(values) for values in zip(*lines.values(), strict=True)), default=0.0)
        drawn = _areas(lines, top, last)
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
        f'<svg viewBox="0 0 {last} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{chart.title}: {words}")}">{"".join(drawn)}</svg>'
    )
    highest = f"<small>{escape(number(top, chart.unit))} at most in {_span(last * STEP_S)}</small>" if lines else ""
    return _figure(chart.title, f"{svg}{highest}<ul>{legend or '<li>nothing yet</li>'}</ul>")


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _areas(lines: Mapping[str, Sequence[float]], top: float, last: int) -> list[str]:
    """What all lines up to each are together, so that it lies behind those before it."""
    drawn: list[str] = []
    sums = [0.0] * (last + 1)
    for index, values in enumerate(lines.values()):
        sums = [below + value for below, value in zip(sums, values, strict=True)]
        corners = f"{last},{_HEIGHT} 0,{_HEIGHT}"
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


def _flow(panel: Flow) -> str:
    """A Sankey diagram: of each stage a band to the right edge, as high as what it answers, and one to the next."""
    step = _WIDTH / max(1, len(panel.shares))
    left, top, drawn, words = 1.0, 0.0, [], []
    for index, (name, share) in enumerate(panel.shares.items()):
        start, answered, sent_on = index * step, share * _HEIGHT, (left - share) * _HEIGHT
        words.append(f"{name} answers {number(share, '%')} of {number(left, '%')}")
        drawn.append(_band(index, start, top, _WIDTH, top, answered))
        left -= share
        if index + 1 < len(panel.shares):
            drawn.append(_band(index, start, top + answered, start + step, top + answered + _GAP, sent_on))
        top += answered + _GAP
    height = _HEIGHT + _GAP * len(panel.shares)
    legend = "".join(f'<li class="c{index % _COLOURS}">{escape(word)}</li>' for index, word in enumerate(words))
    said = escape(f"{panel.title}: {', '.join(words)}")
    box = f'viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none"'
    svg = f'<svg {box} role="img" aria-label="{said}">{"".join(drawn)}</svg>'
    return _figure(panel.title, f"{svg}<ul>{legend}</ul>")


def _band(colour: int, x: float, y: float, to_x: float, to_y: float, height: float) -> str:
    middle = (x + to_x) / 2
    there = f"M{x:g} {y:.1f}C{middle:g} {y:.1f} {middle:g} {to_y:.1f} {to_x:g} {to_y:.1f}"
    back = f"v{height:.1f}C{middle:g} {to_y + height:.1f} {middle:g} {y + height:.1f} {x:g} {y + height:.1f}z"
    return f'<path class="c{colour % _COLOURS}" d="{there}{back}"/>'


def _bars(panel: Bars) -> str:
    most = panel.most or max(panel.bars.values(), default=0.0)
    rows = "".join(
        f"<li>{escape(name)} <b>{escape(number(value, panel.unit))}</b>"
        f'<meter aria-label="{escape(name)}" min="0" max="{most or 1:g}" value="{min(value, most):g}">'
        f"{escape(number(value))}</meter></li>"
        for name, value in panel.bars.items()
    )
    return _figure(panel.title, f'<ul class="bars">{rows or "<li>nothing yet</li>"}</ul>')


def _stacks(panel: Stacks) -> str:
    rows = "".join(_stack(name, parts, panel.unit) for name, parts in list(panel.rows.items())[:_MOST_ROWS])
    *held, left = next(iter(panel.rows.values()), {"": 0.0})
    legend = "".join(f'<li class="c{index % _COLOURS}">{escape(name)}</li>' for index, name in enumerate(held))
    legend += f'<li class="left">{escape(left)}</li>'
    more = len(panel.rows) - _MOST_ROWS
    note = f"<small>and {more} more: see /stats</small>" if more > 0 else ""
    body = f'<ul class="bars">{rows}</ul>{note}<ul>{legend}</ul>' if rows else "<p>nothing yet</p>"
    return _figure(panel.title, body)


def _stack(name: str, parts: Mapping[str, float], unit: str) -> str:
    *held, (_, left) = parts.items()
    taken = sum(value for _, value in held)
    whole = taken + left
    words = ", ".join(f"{part} {number(value, unit)}" for part, value in parts.items())
    drawn, at = [], 0.0
    for index, (_, value) in enumerate(held):
        wide = value / whole * _WIDTH if whole else 0.0
        drawn.append(f'<rect class="c{index % _COLOURS}" x="{at:.1f}" width="{wide:.1f}" height="1"/>')
        at += wide
    return (
        f"<li>{escape(name)} <b>{escape(number(taken, unit))}</b> of {escape(number(whole, unit))}"
        f'<svg class="stack" viewBox="0 0 {_WIDTH} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{name}: {words}")}">{"".join(drawn)}</svg></li>'
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(cell))}</td>' for cell in row)}</tr>" for row in table.rows[:_MOST_ROWS]
    )
    more = len(table.rows) - _MOST_ROWS
    note = f"<small>and {more} more: see /stats</small>" if more > 0 else ""
    wide = f'class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}"'
    body = f"<div {wide}><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    return _figure(table.title, body if table.rows else "<p>none</p>", "whole")


def _cell(cell: str | float) -> str:
    return cell if isinstance(cell, str) else number(cell)


def _figure(title: str, body: str, kind: str = "") -> str:
    return f'<figure class="{kind}"><figcaption>{escape(title)}</figcaption>{body}</figure>'
