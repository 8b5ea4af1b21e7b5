"""What the commands write to: lines, and a bar that says how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TimeRemainingColumn

from pliant.models.sources import Progress

console = Console(soft_wrap=True, highlight=False)


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar that is shown once something says how far it is."""
    columns = (*Bar.get_default_columns()[:-1], TimeRemainingColumn(compact=True))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        last = ""

        def report(text: str, done: float) -> None:
            nonlocal last
            if text != last:
                last = text
                bar.reset(task, description=text)  # the time left is that of what is being done now
            bar.update(task, completed=done)

        yield report
