"""Who splits the budget, by the name that cluster.yaml gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

from pliant.config.budget import made
from pliant.policies.cluster.baselines import Greedy, Independent
from pliant.policies.cluster.control import Decision, Joint, Offer, Policy

_HOLD_S = 3600.0
"""For so long a split is taken to last: the limit on moves an hour is what keeps it calm."""


def by_name(name: str) -> Policy:
    """One to begin with: `joint`, `independent`, `greedy`, or a class of one's own, made without arguments.

    Raises ValueError for a name that is none of these.
    """
    if name == "joint":
        return Joint(hold_s=_HOLD_S)
    known: Mapping[str, type[Policy]] = {"independent": Independent, "greedy": Greedy}
    policy: Policy = known[name]() if name in known else made(name)
    return policy


def checked(decision: Decision, offers: Sequence[Offer]) -> Decision:
    """The decision. Raises RuntimeError where it has no number for a service, or one that it may not have."""
    for service in (service for offer in offers for service in offer.services):
        count = decision.replicas.get(service.name)
        if not isinstance(count, Integral) or not service.least <= count <= service.most:
            raise RuntimeError(f"{service.name} may have {service.least} to {service.most} replicas, got {count!r}")
    return decision
