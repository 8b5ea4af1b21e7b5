"""What the console shows of a service, as data: kinds make it, `http/console/charts.py` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Readings:
    """What one replica has to show over time."""

    levels: Mapping[str, float] = field(default_factory=dict)
    """By name; those of all replicas are added up."""
    counters: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """What only grows while the replica lives, by a key of its own: under which name it counts now, and how much it is.
    What all replicas have counted in a second is added up by name."""


@dataclass(frozen=True)
class Chart:
    """Lines of equal length, a quarter of an hour at most, newest last; `stacked` where their sum means something."""

    title: str
    lines: Mapping[str, Sequence[float]]
    unit: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Bars:
    """What is so now, by name; `most` is a full bar, if that is known."""

    title: str
    bars: Mapping[str, float]
    unit: str = ""
    most: float | None = None


@dataclass(frozen=True)
class Stacks:
    """What is so now, one bar for each row: its parts, by name, side by side, and the last of them what is left."""

    title: str
    rows: Mapping[str, Mapping[str, float]]
    """All have the same parts, in the same order."""
    unit: str = ""


@dataclass(frozen=True)
class Flow:
    """What comes in at the first stage, of which each answers its `share` and sends the rest on to the next."""

    title: str
    shares: Mapping[str, float]
    """Of all that came, by stage."""


@dataclass(frozen=True)
class Table:
    """A table of words and numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]


Panel = Chart | Bars | Stacks | Flow | Table


def number(value: float, unit: str = "") -> str:
    """In at most four digits, for people."""
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"
    if unit == "%":
        return f"{value:.1%}"
    text = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}" if unit else text
