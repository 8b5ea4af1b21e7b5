"""Who gets how many replicas, again and again: what the program says, without flapping, and why.

`Joint` is ours. What keeps it calm is in the program: a split counts for `HOLD_S`, starts and stops cost, so that a
move is made only if it pays for itself within that time. Beyond that each service has a number of moves an hour, of
which the last ones are kept for scaling out.

Under overload the order is that of what is lost: gamma and cut-offs go down, as curves and alternatives have it; batch
services, whose worth counts a thousandth, give way before any other one; then the services that weigh least shed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pliant.policies.cluster.budget import BudgetError, Claim, Floats, Group, Nodes, Shape, Split
from pliant.policies.cluster.program import solve

HOLD_S = 300.0
"""For so long a split is taken to last."""
BATCH = 1e-3
"""Of its worth, what a batch service counts."""
MOVES_PER_HOUR = 6.0
_PRICE = 0.03
_MOST_MOVES = 12.0
"""That may be saved up."""
_KEPT = 4.0
"""Of these, for scaling out."""
_MOVE_S = 60.0
"""What a start or a stop costs beside its own seconds, in a replica's earnings."""


@dataclass(frozen=True)
class Service:
    """A service as it stands."""

    name: str
    shape: Shape
    least: int
    most: int
    running: int
    """Replicas that serve or start."""
    start_s: float
    """What a start takes."""
    load: float = 0.0
    """Demand over what the running replicas can do."""
    price: float = 0.0
    """What a second of a replica must earn, beside the policy's price of its GPUs; of a batch service it counts as its
    worth does."""


def price(worth: Floats, weight: float) -> float:
    """What a second of a replica must earn: a share of what each earns of as many as are of use.

    `worth` is by replicas, `weight` what it may come to.
    """
    return _PRICE * (float(worth.max()) or weight) / max(1, int(worth.argmax()))


@dataclass(frozen=True)
class Offer:
    """Services that are decided on together (see `Group`), and what they earn per second, weighted."""

    services: tuple[Service, ...]
    worth: tuple[tuple[Floats, ...], ...]
    """For each choice and service, with 0 to `most` replicas."""
    batch: bool = False


@dataclass(frozen=True)
class Change:
    name: str
    before: int
    after: int
    reason: str
    """In plain words."""

    def __str__(self) -> str:
        return f"{self.name} {self.before} → {self.after}: {self.reason}"


@dataclass(frozen=True)
class Decision:
    replicas: Mapping[str, int]
    choices: tuple[int, ...]
    """For each offer, which of its alternatives."""
    changes: tuple[Change, ...]
    prices: Mapping[str, float]
    """What one GPU more would earn per second, by service."""


class Policy(Protocol):
    """Decides how a budget is split. `now` is in seconds on a clock that does not run backwards."""

    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision: ...


class Joint:
    """One program over all services. A GPU's second must earn `price`; at 0 whatever earns anything gets GPUs."""

    def __init__(self, price: float = 0.0, hold_s: float = HOLD_S, moves_per_hour: float = MOVES_PER_HOUR) -> None:
        if price < 0 or hold_s <= 0 or moves_per_hour <= 0:
            raise ValueError("needs a price of at least 0, and a positive hold_s and moves_per_hour")
        self._price = price
        self._hold_s = hold_s
        self._per_s = moves_per_hour / 3600
        self._moves: dict[str, tuple[float, float]] = {}
        """By service: how many it had left, and when."""

    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision:
        """Raises BudgetError where the least replicas and the reserve do not fit."""
        try:
            split = solve([self._group(now, offer) for offer in offers], nodes, reserve)
        except BudgetError:  # what runs does not fit any more: a node is gone
            split = solve([self._group(None, offer) for offer in offers], nodes, reserve)
        for service in _services(offers):
            if split.replicas[service.name] != service.running:
                self._moves[service.name] = self._left(now, service.name) - 1, now
        return _decision(offers, split)

    def _group(self, now: float | None, offer: Offer) -> Group:
        """The offer as the program has it; without `now` nothing limits moves."""
        weight = BATCH if offer.batch else 1.0
        claims = []
        for at, service in enumerate(offer.services):
            highest = max((worth[at] for worth in offer.worth), key=lambda worth: float(worth.max()))
            each = weight * float(highest.max()) / max(1, int(highest.argmax()))
            least, most = self._limits(now, service)
            costs = each * (service.start_s + _MOVE_S), each * _MOVE_S
            claims.append(Claim(service.name, service.shape, least, most, service.running, *costs))
        alternatives = tuple(
            tuple(
                self._hold_s
                * (
                    weight * worth[: claim.most + 1]
                    - (self._price * claim.shape.gpus + weight * service.price) * np.arange(claim.most + 1)
                )
                for claim, service, worth in zip(claims, offer.services, each_worth, strict=True)
            )
            for each_worth in offer.worth
        )
        return Group(tuple(claims), alternatives)

    def _limits(self, now: float | None, service: Service) -> tuple[int, int]:
        if now is None or not service.least <= service.running <= service.most:
            return service.least, service.most
        left = self._left(now, service.name)
        least = service.least if left >= 1 + _KEPT else service.running
        most = service.most if left >= 1 else service.running
        return least, most

    def _left(self, now: float, name: str) -> float:
        left, then = self._moves.get(name, (_MOST_MOVES, now))
        return min(_MOST_MOVES, left + self._per_s * (now - then))


def _services(offers: Sequence[Offer]) -> list[Service]:
    return [service for offer in offers for service in offer.services]


def _decision(offers: Sequence[Offer], split: Split) -> Decision:
    worth = {
        service.name: curve
        for offer, choice in zip(offers, split.choices, strict=True)
        for service, curve in zip(offer.services, offer.worth[choice], strict=True)
    }
    return explained(_services(offers), worth, split.replicas, split.choices)


def explained(
    services: Sequence[Service], worth: Mapping[str, Floats], replicas: Mapping[str, int], choices: tuple[int, ...]
) -> Decision:
    """A decision with its reasons, and the price of a GPU to each service, from what each earns by its replicas."""
    moved = [service for service in services if replicas[service.name] != service.running]
    changes = []
    for service in moved:
        others = [other for other in moved if (_delta(other, replicas) > 0) != (_delta(service, replicas) > 0)]
        curve, before, after = worth[service.name], service.running, replicas[service.name]
        changes.append(Change(service.name, before, after, _reason(curve, before, after, others, worth, replicas)))
    prices = {}
    for service in services:
        curve, count = worth[service.name], replicas[service.name]
        more = float(curve[count + 1] - curve[count]) if count < service.most else 0.0
        prices[service.name] = more / service.shape.gpus if service.shape.gpus else more
    return Decision(dict(replicas), choices, tuple(changes), prices)


def _delta(service: Service, replicas: Mapping[str, int]) -> int:
    return replicas[service.name] - service.running


def _reason(
    curve: Floats,
    before: int,
    after: int,
    others: Sequence[Service],
    worth: Mapping[str, Floats],
    replicas: Mapping[str, int],
) -> str:
    highest = float(curve.max())
    if highest <= 0:
        return "nothing is asked of it"
    now, then = (float(curve[min(count, len(curve) - 1)]) / highest for count in (before, after))
    said = f"{then:.1%} of what it could earn, {now:.1%} with {before}"
    if after < before:
        takers = ", ".join(other.name for other in others)
        return f"{said}; {takers} can use the room better" if takers else f"{said}: what went earned too little"
    givers = [
        f"{-_delta(other, replicas)} from {other.name}, which loses {_loss(worth[other.name], other, replicas):.1%}"
        for other in others
    ]
    return f"{said}; took {', '.join(givers)}" if givers else said


def _loss(curve: Floats, service: Service, replicas: Mapping[str, int]) -> float:
    highest = float(curve.max())
    if highest <= 0:
        return 0.0
    return float(curve[min(service.running, len(curve) - 1)] - curve[replicas[service.name]]) / highest
