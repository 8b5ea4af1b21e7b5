"""A picture of a profile: latency against length, static and dynamic (Arlo, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pliant.formats.profile import Profile


def plot(profile: Profile, bins: Sequence[int], path: Path) -> None:
    """Write a picture of `profile`, of the staircase's edges and of what texts take on runtimes for `bins`, as PNG."""
    from matplotlib.figure import Figure  # takes most of a second, and only this function needs it

    milliseconds = 1e3 * np.array([profile.dynamic_s, profile.static_s])
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(profile.lengths, milliseconds[0], label="dynamic")
    (line,) = axes.plot(profile.lengths, milliseconds[1], label="static, estimated")
    if profile.packed_s:
        axes.plot(profile.lengths, 1e3 * np.array(profile.packed_s), label="packed")
    at = np.isin(profile.lengths, profile.static_at)
    axes.plot(np.array(profile.lengths)[at], milliseconds[1][at], "o", color=line.get_color(), label="static, measured")
    if profile.static_pays:
        padded = [1e3 * profile.service_s(length, "static") for length in bins]
        axes.stairs(padded, [0, *bins], baseline=None, color="black", label="static, padded to the chosen bins")
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
