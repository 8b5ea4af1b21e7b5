"""A text classifier that only sleeps, and a budget's policy that does as it is told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from support.doubles import Sleepers

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.policies.cluster.budget import Nodes
from pliant.policies.cluster.control import Decision, Offer, explained

SLEEPING = "sleeping"
"""The service whose replicas these are."""
POLICY = "e2e.scaled:Told"
TOLD = "PLIANT_TEST_TOLD"
"""Names a file with the number of replicas that each service is to have."""


class SleepingReplica(EncoderReplica):
    def runtimes(self, config: EncoderConfig) -> Sleepers:
        assert config.lengths
        return Sleepers(config.lengths, service_s=0, per_token_s=1e-3)


class Told:
    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision:
        services = [service for offer in offers for service in offer.services]
        told = int(Path(os.environ[TOLD]).read_text())
        worth = {
            service.name: curve
            for offer in offers
            for service, curve in zip(offer.services, offer.worth[0], strict=True)
        }
        replicas = {service.name: min(max(told, service.least), service.most) for service in services}
        return explained(services, worth, replicas, (0,) * len(offers))
