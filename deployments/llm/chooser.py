"""Which replica gets a prompt: one that has computed the beginning of it, or that has its adapter, and not too much.

Replicas report some of the prefixes that they hold, as `prefix_affinity` names them; what this gateway has sent since
is known without. Only names go over the wire: eight bytes for a conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from functools import partial
from typing import NamedTuple

from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.serving.least_held import LeastHeld
from pliant.deployments.serving.table import Choice
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.cluster.prefix_affinity import PrefixAffinity, blocks

_NAME = 8


class Prompted(NamedTuple):
    """What a request comes to hold in its replica, and what it would like to find there."""

    amount: int
    """Live tokens."""
    near: str | None = None
    """Its adapter."""
    predicted_s: float | None = None
    root: str = ""
    """Whose prefixes it shares."""
    tokens: tuple[int, ...] = ()
    """Of its prompt."""


def root_name(adapter: AdapterRef | None, tenant: Hashable) -> str:
    """What gateways and replicas alike call those whose prefixes are shared: of an adapter, and of a tenant or all."""
    return f"{adapter.key if adapter else ''}\0{tenant or ''}"


def joined(names: Collection[bytes]) -> str:
    """Names of prefixes, for a report."""
    return b"".join(names).hex()


class NearPrefix(LeastHeld):
    """A `Chooser`."""

    def __init__(self) -> None:
        super().__init__()
        self._affinity: PrefixAffinity[str] = PrefixAffinity()
        self._page = 0

    def update(self, replica: str, report: ReplicaReport, others: float) -> None:  # type: ignore[override]
        super().update(replica, report, others)
        if "digest" in report:  # a replica of another version may have none
            self._page = report["memory"]["page"]
            names = bytes.fromhex(report["digest"])
            self._affinity.holds(replica, {names[at : at + _NAME] for at in range(0, len(names), _NAME)})

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._affinity.remove(replica)

    def choose(self, want: Prompted, avoid: Collection[str]) -> Choice:  # type: ignore[override]
        names = blocks(want.root, want.tokens, self._page) if self._page else []
        choice = self._choose(want, avoid, partial(self._affinity.choose, names))
        self._affinity.sent(names, choice.replica)
        return choice
