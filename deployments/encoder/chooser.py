"""Arlo's dispatcher as the call path's chooser."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from pliant.deployments.encoder.errand import TextWant
from pliant.deployments.encoder.messages import Report, home
from pliant.deployments.serving.table import Choice, NoReplicaError, NoTimeError
from pliant.policies.encoder.admission import DeadlineError
from pliant.policies.encoder.dispatch import Algorithm1, AllAvoidedError, Dispatcher, NoRuntimeError
from pliant.policies.encoder.service_curve import ServiceCurve
from pliant.policies.encoder.shares import shares

_IMPORTANCE = 3.0
"""What a text may take of whose tokens is told, over what is predicted for it and those before it without that.

To tell takes more than another pass over a long text (see `kernels.encoder.importance_classifier`).
"""


class _Sent(NamedTuple):
    """What a text adds to a replica's work."""

    work: int
    tenant: str


class EncoderChooser:
    """A `Chooser` that counts in seconds of work.

    It knows how much there is to do in a replica, and not whose turn it is there: where several tenants have work, a
    text that would be late if it came last is sent all the same, and the replica refuses it if it will be late.
    """

    def __init__(self, slo_s: float, rule: Algorithm1 | None = None) -> None:
        """By the paper's rule, if one is given."""
        self._dispatcher: Dispatcher[str] = Dispatcher(slo_s, rule)
        self._tenants: dict[str, frozenset[str]] = {}
        """By replica: those with work waiting there, as it reports."""
        self._margins: dict[str, Mapping[str, float]] = {}
        """By replica: those that it reports."""
        self._sent: Counter[str] = Counter()
        """By tenant: texts that this gateway has sent, and that are not answered."""
        self._reads = ""
        """The interface of this gateway's model; "" until it is open."""
        self._interfaces: dict[str, str] = {}
        """By replica: that of its model."""
        self._homes: dict[str, int] = {}
        """By replica: the length at which it was last at home."""
        self._me = ""
        self._gateways: frozenset[str] = frozenset()

    def serves(self, length: int) -> bool:
        """Whether some replica may be sent texts of `length` tokens now."""
        return self._dispatcher.longest >= length

    def read_as(self, interface: str) -> None:
        """From now on choose replicas only whose model reads texts in this way (see `models.revision`)."""
        self._reads = interface
        for replica in self._interfaces:
            if not self._suits(replica):
                self._dispatcher.suspend(replica)

    def _suits(self, replica: str) -> bool:
        return not self._reads or self._interfaces[replica] in ("", self._reads)

    def update(self, replica: str, report: Report, others: float) -> None:
        """One that switches holds nothing, and is not chosen."""
        self._interfaces[replica] = report.get("reads", "")
        if report["curve"] and self._suits(replica):
            at, curve = home(report), ServiceCurve(report["curve"], tuple(report.get("shares", ())))
            self._dispatcher.assign(replica, report["max_length"], curve, at)
            if self._homes.get(replica) != at:
                self._homes[replica] = at
                self._divide()
        else:
            self._dispatcher.suspend(replica)
        self._dispatcher.report(replica, others)
        self._tenants[replica] = frozenset(report.get("tenants", ()))
        self._margins[replica] = report.get("margins", {})

    def suspend(self, replica: str) -> None:
        self._dispatcher.suspend(replica)

    def remove(self, replica: str) -> None:
        self._dispatcher.remove(replica)
        self._tenants.pop(replica, None)
        self._margins.pop(replica, None)
        self._interfaces.pop(replica, None)
        if self._homes.pop(replica, None):
            self._divide()

    def share(self, me: str, gateways: Collection[str]) -> None:
        """Each gateway prefers replicas of its own, so that they do not all run to the same one."""
        if (me, gateways) != (self._me, self._gateways):
            self._me, self._gateways = me, frozenset(gateways)
            self._divide()

    def choose(self, want: TextWant, avoid: Collection[str]) -> Choice:
        try:
            replica, seconds, work = self._dispatched(want, avoid)
        except (NoRuntimeError, AllAvoidedError) as error:
            raise NoReplicaError(str(error)) from None
        except DeadlineError as error:
            raise NoTimeError(error.retry_after_s, error.service_s) from None
        self._sent[want.tenant] += 1
        return Choice(replica, seconds * _IMPORTANCE if want.importance else seconds, _Sent(work, want.tenant))

    def _dispatched(self, want: TextWant, avoid: Collection[str]) -> tuple[str, float, int]:
        margin = min((each.get(want.tenant, 0.0) for each in self._margins.values()), default=0.0)
        try:
            return self._dispatcher.dispatch(want.length, want.budget_s, want.slack_share / (1 + margin), avoid)
        except DeadlineError as error:
            if want.budget_s is None or math.isinf(error.retry_after_s) or not self._contended(want.tenant):
                raise
            replica, _, work = self._dispatcher.dispatch(want.length, avoid=avoid)
            return replica, want.budget_s, work

    def _contended(self, tenant: str) -> bool:
        """Whether others than `tenant` have work in the replicas."""
        return not (self._sent.keys() <= {tenant} and frozenset().union(*self._tenants.values()) <= {tenant})

    def done(self, choice: Choice) -> None:
        sent: _Sent = choice.work
        self._dispatcher.complete(choice.replica, sent.work)
        self._sent[sent.tenant] -= 1
        if not self._sent[sent.tenant]:
            del self._sent[sent.tenant]

    def _divide(self) -> None:
        several = len(self._gateways) > 1
        self._dispatcher.prefer(shares(self._homes, self._gateways)[self._me] if several else None)
