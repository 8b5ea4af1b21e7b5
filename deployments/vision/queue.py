"""The images that wait for a replica: in batches of like deadline and worth, and in turn by tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.tenants import Tenant
from pliant.deployments.vision.messages import Answer
from pliant.policies.cluster.fair_share import FairShare
from pliant.policies.vision.slo_batching import Batch, Batching, SloBatcher


@dataclass(eq=False, slots=True)
class Waiting:
    """An image that waits or is computed; times are the loop's."""

    image: bytes
    task: str
    """Its key."""
    arrival: float
    deadline: float
    utility: float
    tenant: Tenant
    reply: asyncio.Future[Answer | Refusal] = field(repr=False)

    def settle(self, reply: Answer | Refusal) -> bool:
        """Whether anybody still waited for the reply, which is given once."""
        if self.reply.done():
            return False
        self.reply.set_result(reply)
        return True


class Queue:
    """At most `limit` images, of which `batching` says which wait together. Tenants share seconds of computing."""

    def __init__(self, limit: int, batching: Batching) -> None:
        self._batcher: SloBatcher[Waiting] = SloBatcher(limit, batching)
        self._share: FairShare[Waiting] = FairShare()

    def __len__(self) -> int:
        return len(self._batcher)

    @property
    def batches(self) -> Sequence[Batch[Waiting]]:
        return self._batcher.batches

    def waiting_s(self) -> dict[str, float]:
        """Seconds of computing that wait, by tenant."""
        return {tenant: round(seconds, 6) for tenant, seconds in self._share.waiting().items()}

    def add(self, waiting: Waiting, seconds: float) -> Waiting | None:
        """It waits, for `seconds` of computing. Returns whom the full queue has no place for: an image of the tenant
        that is furthest over its share."""
        over = self._share.furthest_over(*waiting.tenant, seconds) if self._batcher.full else None
        self._share.add(waiting, *waiting.tenant, seconds)
        unlucky = self._batcher.add(waiting, frozenset(self._share.newest(over)) if over else None)
        if unlucky:
            self._share.remove(unlucky)
        return unlucky

    def remove(self, waiting: Waiting) -> None:
        """It does not wait any more, if it did."""
        self._batcher.remove(waiting)
        self._share.remove(waiting)

    def take(self, batch: Batch[Waiting], queries: Sequence[Waiting], seconds: float) -> None:
        """These of `batch` are computed now, in `seconds` each."""
        self._batcher.take(batch, queries)
        for query in queries:
            self._share.take(query, seconds)

    def charge(self, tenant: Tenant, seconds: float) -> None:
        """Computing an image of `tenant` took so many seconds more than was said when it was taken."""
        self._share.charge(*tenant, seconds)

    def drop_late(self, by: float) -> list[Waiting]:
        """Those with deadlines before `by`, which do not wait any more."""
        late = self._batcher.drop_late(by)
        for query in late:
            self._share.remove(query)
        return late

    def turns(self) -> Iterator[tuple[str, Sequence[Batch[Waiting]]]]:
        """Tenants with images that wait, whose turn it is first, and the batches that have any of theirs; all batches
        where no others wait."""
        batches = self._batcher.batches
        for tenant in self._share.turns():
            theirs = [batch for batch in batches if any(query.tenant.name == tenant for query in batch.queries)]
            yield tenant, theirs if self._share.contended else batches
