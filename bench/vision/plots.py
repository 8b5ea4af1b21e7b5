"""Plots named for the figures of the OTAS paper that they repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plot

from pliant.bench.vision.profiles import MOST_ROWS, Profile
from pliant.bench.vision.runs import Compared
from pliant.bench.vision.systems import ALGORITHM_2, OURS, PETS
from pliant.simulation.vision.outcome import Fate

plt.rcParams["figure.max_open_warning"] = 0  # a report closes its plots once it has written them

_FATES = ("right and in time", "wrong", "late", "evicted")


def evaluation(profile: Profile, both: Sequence[Compared]) -> dict[str, Plot]:
    """Figures 4 and 7 to 13, with a panel for each workload."""
    return {
        "fig4": _tokens(profile),
        "fig7": _batches(profile),
        "fig8": _panels(both, _load),
        "fig9": _panels(both, _systems),
        "fig10": _panels(both, _fixed),
        "fig11": _panels(both, _accuracies),
        "fig12": _panels(both, _gammas),
        "fig13": _panels(both, _fates),
    }


def by_load(loads: Sequence[float], lines: Mapping[str, Sequence[float]]) -> Plot:
    """Our utility over that of others."""
    plot, axes = plt.subplots(figsize=(7, 4))
    for name, values in lines.items():
        axes.plot(loads, values, marker="o", label=name)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xlabel="times the load that swings between 0.35 and 1.2 of the capacity", ylabel="our utility over it")
    axes.legend()
    return plot


def _tokens(profile: Profile) -> Plot:
    plot, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    for task, accuracies in profile.accuracies.items():
        left.plot(list(accuracies), list(accuracies.values()), marker="o", label=task)
    left.set(xlabel="gamma", ylabel="accuracy")
    left.legend()
    right.plot(profile.gammas, [profile.per_s(gamma) for gamma in profile.gammas], marker="o")
    right.set(xlabel="gamma", ylabel="images/s")
    return plot


def _batches(profile: Profile) -> Plot:
    plot, axes = plt.subplots(figsize=(7, 4))
    rows = np.arange(1, MOST_ROWS + 1)
    for gamma, seconds in zip(profile.gammas, profile.seconds, strict=True):
        axes.plot(rows, rows / np.array(seconds), label=f"gamma {gamma:+d}")
    axes.set(xlabel="images in a batch", ylabel="images/s")
    axes.legend()
    return plot


def _panels(both: Sequence[Compared], draw: object) -> Plot:
    plot, panes = plt.subplots(1, len(both), figsize=(6.5 * len(both), 4), squeeze=False)
    for axes, this in zip(panes[0], both, strict=True):
        draw(axes, this)  # type: ignore[operator]
        axes.set_title(this.workload)
    return plot


def _load(axes: Axes, this: Compared) -> None:
    axes.plot(this.trace.loads)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xlabel="time (s)", ylabel="load, of the capacity at gamma 0")


def _systems(axes: Axes, this: Compared) -> None:
    _over_time(axes, this, [OURS.name, ALGORITHM_2.name, PETS.name, this.infaas.name, this.slackfit.name])


def _fixed(axes: Axes, this: Compared) -> None:
    _over_time(axes, this, [OURS.name, *(name for name in this.outcomes if name.startswith(("ToMe", "PetS", "VPT")))])


def _over_time(axes: Axes, this: Compared, names: Sequence[str]) -> None:
    moments = np.linspace(0, len(this.trace.loads), 200)
    for name in names:
        axes.plot(moments, this.outcomes[name].cumulated(moments), label=name)
    axes.set(xlabel="time (s)", ylabel="utility")
    axes.legend(fontsize="small")


def _accuracies(axes: Axes, this: Compared) -> None:
    for name in _main(this):
        shares = np.sort([batch.right for batch in this.outcomes[name].batches])
        axes.plot(shares, np.arange(1, len(shares) + 1) / len(shares), label=name)
    axes.set(xlabel="accuracy of a batch", ylabel="share of batches")
    axes.legend(fontsize="small")


def _gammas(axes: Axes, this: Compared) -> None:
    shares = sorted(this.ours.gammas().items())
    axes.bar([f"{gamma:+d}" for gamma, _ in shares], [share for _, share in shares])
    axes.set(xlabel="gamma", ylabel="share of the images that were computed")


def _fates(axes: Axes, this: Compared) -> None:
    names = _main(this)
    below = np.zeros(len(names))
    for fate, label in zip(Fate, _FATES, strict=True):
        shares = np.array([this.outcomes[name].share(fate) for name in names])
        axes.bar(names, shares, bottom=below, label=f"type {fate.value}: {label}")
        below += shares
    axes.tick_params("x", rotation=20, labelsize="small")
    axes.set(ylabel="share of queries")
    axes.legend(fontsize="small")


def _main(this: Compared) -> list[str]:
    """Ours and the others' best."""
    merging, prompts = (
        max(
            (name for name in this.outcomes if name.startswith(kind)),
            key=lambda name: this.outcomes[name].utility,
            default=OURS.name,
        )
        for kind in ("ToMe", "VPT")
    )
    return list(
        dict.fromkeys((OURS.name, ALGORITHM_2.name, PETS.name, merging, prompts, this.infaas.name, this.slackfit.name))
    )
