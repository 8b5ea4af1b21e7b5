"""What the commands write to: lines, and a bar that says how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar

from pliant.models import Progress

console = Console(soft_wrap=True, highlight=False)


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar that is shown once something says how far it is."""
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)
