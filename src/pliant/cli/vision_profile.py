"""What each gamma of a vision service costs and gives on this machine, as `pliant profile` shows it (OTAS §III-A)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

_SHOWN = (1, 8, 64)
"""Batches whose latency the table has, if they were measured."""


@dataclass(frozen=True)
class VisionProfile:
    """Latency, memory and accuracy by gamma."""

    name: str
    """Of the service."""
    model: str
    device: str
    gammas: tuple[int, ...]
    batches: tuple[int, ...]
    """Images in a run, rising: those that were measured."""
    seconds: tuple[tuple[float, ...], ...]
    """By gamma, then batch."""
    memory_bytes: tuple[tuple[int, ...], ...]
    """By gamma, then batch: about what a run takes beside weights."""
    accuracies: Mapping[str, Mapping[int, float]]
    """By task, then gamma, on images that training has not seen; those that a task has no prompts for are missing."""
    useless: Mapping[int, int]
    """Gammas that the service does not use, with one that is at least as fast, and as accurate for every task."""

    def table(self) -> Table:
        """One row for each gamma."""
        shown = [index for index, rows in enumerate(self.batches) if rows in _SHOWN]
        latencies = (f"ms for {self.batches[index]}" for index in shown)
        table = Table("gamma", *latencies, "images/s", f"MB for {self.batches[-1]}", *self.accuracies, "used")
        for gamma, seconds, memory in zip(self.gammas, self.seconds, self.memory_bytes, strict=True):
            known = (each.get(gamma) for each in self.accuracies.values())
            table.add_row(
                f"{gamma:+d}" if gamma else "0",
                *(f"{1e3 * seconds[index]:.2f}" for index in shown),
                f"{self._throughput(seconds):.0f}",
                f"{memory[-1] / 1e6:.1f}",
                *("-" if accuracy is None else f"{accuracy:.1%}" for accuracy in known),
                "no" if gamma in self.useless else "yes",
            )
        return table

    def summary(self) -> str:
        """Why which gammas are not used, in a line each; empty if all are."""
        return "\n".join(
            f"gamma {gamma} is not used with these tasks: {better} is at least as fast, and as accurate for each"
            for gamma, better in self.useless.items()
        )

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    def plot(self, path: Path) -> None:
        """Latency against batch, and accuracy against throughput (OTAS, figure 4), as PNG."""
        from matplotlib.figure import Figure  # takes most of a second, and only this function needs it

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        for gamma, seconds in zip(self.gammas, self.seconds, strict=True):
            style = ":" if gamma in self.useless else "-"
            left.plot(self.batches, [1e3 * each for each in seconds], style, marker=".", label=f"gamma {gamma}")
        rates = {gamma: self._throughput(each) for gamma, each in zip(self.gammas, self.seconds, strict=True)}
        for task, accuracies in self.accuracies.items():
            right.plot([rates[gamma] for gamma in accuracies], list(accuracies.values()), marker="o", label=task)
            for gamma, accuracy in accuracies.items():
                right.annotate(str(gamma), (rates[gamma], accuracy), xytext=(4, 4), textcoords="offset points")
        figure.suptitle(f"{self.model} on {self.device}")
        left.set(xlabel="images in a batch", ylabel="latency (ms)", xlim=(0, None), ylim=(0, None))
        right.set(xlabel="images per second, in the batches that suit each gamma best", ylabel="accuracy")
        left.legend()
        if self.accuracies:
            right.legend()
        figure.savefig(path, dpi=150)

    def _throughput(self, seconds: tuple[float, ...]) -> float:
        return max(rows / each for rows, each in zip(self.batches, seconds, strict=True))
