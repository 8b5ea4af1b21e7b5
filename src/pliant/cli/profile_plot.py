"""A picture of a profile: latency against length, static and dynamic (Arlo, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pliant.formats.profile import Profile, RuntimeKind


def plot(profile: Profile, bins: Sequence[int], path: Path) -> None:
    """Write a picture of `profile`, of the staircase's edges and of what texts take on runtimes for `bins`, as PNG."""
    from matplotlib.figure import Figure  # takes most of a second, and only this function needs it

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind in profile.kinds:
        label = "static, estimated" if kind == "static" else profile.name(kind)
        (line,) = axes.plot(profile.lengths, _milliseconds(profile, profile.lengths, kind), label=label)
        if kind == "static":
            at = profile.static_at
            measured = _milliseconds(profile, at, kind)
            axes.plot(at, measured, "o", color=line.get_color(), label="static, measured")
    if profile.static_pays:
        axes.stairs(
            _milliseconds(profile, bins, "static"),
            [0, *bins],
            baseline=None,
            color="black",
            label="static, padded to the chosen bins",
        )
    for edge in profile.steps:
        axes.axvline(edge, color="grey", linestyle=":", label="jump" if edge == profile.steps[0] else None)
    axes.set(
        title=f"{profile.model} on {profile.device}, {profile.dtype}, {profile.threads} CPU thread(s)",
        xlabel="tokens; bins end at " + ", ".join(map(str, bins)),
        ylabel="latency (ms)",
        xlim=(0, profile.longest * 1.02),
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(path, dpi=150)


def _milliseconds(profile: Profile, lengths: Sequence[int], kind: RuntimeKind) -> list[float]:
    return [1e3 * profile.service_s(length, kind) for length in lengths]
