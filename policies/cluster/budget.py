"""What a cluster has, what its services want of it, and what they get: the terms of the program in `program`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FINEST_SHARE = 100


class BudgetError(ValueError):
    """The least replicas of all services, and the reserve, do not fit."""


@dataclass(frozen=True, order=True)
class Shape:
    """What one replica takes: whole GPUs of one node (a gang, if several), or a share of one GPU; and CPUs of a node.

    Raises ValueError for GPUs that are neither whole nor a share, and for a replica that takes nothing.
    """

    gpus: float
    cpus: float = 0.0

    def __post_init__(self) -> None:
        whole = self.gpus == int(self.gpus)
        if self.gpus < 0 or self.cpus < 0 or not (whole or self.gpus < 1) or not (self.gpus or self.cpus):
            raise ValueError(f"needs whole GPUs, or a share of one, or CPUs, got {self.gpus} GPUs and {self.cpus} CPUs")

    @property
    def share(self) -> Fraction:
        """The GPUs as an exact number, to a hundredth."""
        return Fraction(self.gpus).limit_denominator(_FINEST_SHARE)


@dataclass(frozen=True)
class Nodes:
    """So many nodes that are alike."""

    count: int
    gpus: int
    cpus: float = 0.0


@dataclass(frozen=True)
class Claim:
    """A service that may have `least` to `most` replicas, and has `running`.

    What starting or stopping a replica costs is in the unit of the gains.
    """

    name: str
    shape: Shape
    least: int
    most: int
    running: int = 0
    start_cost: float = 0.0
    stop_cost: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.running < 0 or self.start_cost < 0 or self.stop_cost < 0:
            raise ValueError(f"{self.name}: needs 0 <= least <= most, and no negative number of replicas or cost")

    def net(self, gain: Floats) -> Floats:
        """The gain of 0 to `most` replicas less what it costs to get there; minus infinity below `least`."""
        replicas = np.arange(self.most + 1)
        moves = self.start_cost * np.maximum(replicas - self.running, 0)
        moves += self.stop_cost * np.maximum(self.running - replicas, 0)
        net: Floats = np.where(replicas < self.least, -np.inf, gain - moves)
        return net


@dataclass(frozen=True)
class Group:
    """Services whose gains depend on one choice: a cascade's levels, on its cut-offs. Most services are alone."""

    claims: tuple[Claim, ...]
    alternatives: tuple[tuple[Floats, ...], ...]
    """For each choice, what each claim gains with 0 to `most` replicas."""

    def __post_init__(self) -> None:
        for gains in self.alternatives:
            if [len(gain) for gain in gains] != [claim.most + 1 for claim in self.claims]:
                raise ValueError(f"needs a gain for 0 to `most` replicas of {[claim.name for claim in self.claims]}")
        if not self.alternatives:
            raise ValueError("needs an alternative at least")


def alone(claim: Claim, gain: Sequence[float] | Floats) -> Group:
    """A service that nothing else depends on."""
    return Group((claim,), ((np.asarray(gain, np.float64),),))


@dataclass(frozen=True)
class Split:
    """Who gets how many replicas."""

    replicas: Mapping[str, int]
    choices: tuple[int, ...]
    """For each group, which of its alternatives."""
    gain: float
    """Of all, less the costs of starts and stops."""
    bound: float
    """No split gains more."""

    @property
    def gap(self) -> float:
        """By how much the bound is above the gain, as a share of it; 0 where the split is proven to be the best."""
        return max(0.0, self.bound - self.gain) / max(abs(self.gain), 1e-12)


def gain_of(groups: Sequence[Group], replicas: Mapping[str, int], choices: Sequence[int]) -> float:
    """What a split gains, less its starts and stops."""
    return sum(
        float(claim.net(gain)[replicas[claim.name]])
        for group, choice in zip(groups, choices, strict=True)
        for claim, gain in zip(group.claims, group.alternatives[choice], strict=True)
    )


def units(shapes: Sequence[Shape]) -> int:
    """Into how many equal parts a GPU must be cut so that every shape takes a whole number of them."""
    return lcm(*(shape.share.denominator for shape in shapes))
