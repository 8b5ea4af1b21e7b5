"""The way of one HTTP request through the call path, for a client that asks for it: what took how long, and where.

Where nobody asked, nothing is noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

_MOST = 32
"""Steps that are shown: a request may have a thousand texts."""
_MOST_ABOUT = 200
"""Characters."""


class Step(NamedTuple):
    """One thing that took time; steps of several texts or levels lie beside or behind each other."""

    name: str
    seconds: float
    about: str = ""


_steps: ContextVar[list[Step] | None] = ContextVar("steps", default=None)


def follow() -> list[Step]:
    """The list in which the steps are noted, from now on, of the request that is worked on."""
    steps: list[Step] = []
    _steps.set(steps)
    return steps


def steps_wanted() -> list[Step] | None:
    """Where steps are to be noted; None: nobody wants them."""
    return _steps.get()


def server_timing(steps: Sequence[Step]) -> str:
    """As the header `Server-Timing` has it, in milliseconds."""
    return ", ".join(f"{step.name};dur={step.seconds * 1e3:.3f}{_about(step.about)}" for step in steps[:_MOST])


def _about(text: str) -> str:
    plain = text[:_MOST_ABOUT].encode("ascii", "replace").decode()
    printed = "".join(letter if letter.isprintable() and letter not in '"\\' else "?" for letter in plain)
    return f';desc="{printed}"' if printed else ""
