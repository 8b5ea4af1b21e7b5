"""What others do: each service scales by itself, or replicas go where the next one earns most."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from pliant.policies.cluster.budget import Nodes, Shape
from pliant.policies.cluster.control import BATCH, Decision, Offer, Service, explained
from pliant.policies.cluster.load_tracking import LoadTracking
from pliant.policies.cluster.placement import first_fit


class Independent:
    """Target tracking, as Kubernetes and Serve do it: each service has `target` of its replicas busy.

    What there is room for is given first come, first served: to who has asked for longest. Replicas go when fewer have
    been wanted for `down_s`.
    """

    def __init__(self, target: float = 0.7, down_s: float = 300.0) -> None:
        self._tracking: defaultdict[str, LoadTracking] = defaultdict(partial(LoadTracking, target, down_s))
        self._asking: dict[str, float] = {}
        """Since when a service has wanted more than it has."""

    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision:
        services = [service for offer in offers for service in offer.services]
        replicas, wanted = {}, {}
        for service in services:
            tracking = self._tracking[service.name]
            count = tracking.desired(now, service.load, service.running, service.least, service.most)
            wanted[service.name] = count
            replicas[service.name] = min(service.running, count)
            if count > service.running:
                self._asking.setdefault(service.name, now)
            else:
                self._asking.pop(service.name, None)
        for service in sorted(services, key=lambda each: self._asking.get(each.name, math.inf)):
            while replicas[service.name] < wanted[service.name]:
                replicas[service.name] += 1
                if not _fit(replicas, services, nodes, reserve):
                    replicas[service.name] -= 1
                    break
        worth = {
            service.name: curve
            for offer in offers
            for service, curve in zip(offer.services, offer.worth[0], strict=True)
        }
        return explained(services, worth, replicas, (0,) * len(offers))


class Greedy:
    """From the least of each service on, one more replica where it earns most per GPU, as long as that is `price`."""

    def __init__(self, price: float = 0.0) -> None:
        self._price = price

    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision:
        services = [service for offer in offers for service in offer.services]
        worth = {
            service.name: (BATCH if offer.batch else 1.0) * curve
            for offer in offers
            for service, curve in zip(offer.services, offer.worth[0], strict=True)
        }
        replicas = {service.name: service.least for service in services}
        open_to = {service.name: service for service in services}
        while open_to:
            gains = {
                name: float(worth[name][replicas[name] + 1] - worth[name][replicas[name]]) / (service.shape.gpus or 1)
                for name, service in open_to.items()
                if replicas[name] < service.most
            }
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or gains[best] <= self._price:
                break
            replicas[best] += 1
            if not _fit(replicas, services, nodes, reserve):
                replicas[best] -= 1
                del open_to[best]
        return explained(services, worth, replicas, (0,) * len(offers))


def _fit(replicas: dict[str, int], services: Sequence[Service], nodes: Sequence[Nodes], reserve: int) -> bool:
    wanted = [(service.shape, replicas[service.name]) for service in services]
    return first_fit([*wanted, (Shape(1), reserve)], nodes)
