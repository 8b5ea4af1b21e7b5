"""What one gateway process knows of a service's replicas: the dispatcher, kept true by what the replicas report.

Plain Python, without Ray. Serve pickles the router class by value, so the router and the gateway meet in this module:
both ask `shared` for the table of their service. All calls come from one event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from pliant.deployments.encoder.engine import Report
from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.service_curve import ServiceCurve

_tables: dict[str, RoutingTable] = {}


def shared(service: str, slo_s: float) -> RoutingTable:
    """The process's table of `service`."""
    return _tables.setdefault(service, RoutingTable(slo_s))


class RoutingTable:
    """Arlo's dispatcher over the replicas that are known to live, and the latest report of each."""

    def __init__(self, slo_s: float) -> None:
        self._dispatcher: Dispatcher[str] = Dispatcher(slo_s)
        self._live: set[str] = set()
        self._lost: set[str] = set()
        self._suspects: set[str] = set()
        self._moving: frozenset[str] = frozenset()
        self._reports: dict[str, Report] = {}
        self._sent: dict[str, deque[int]] = {}
        """By replica: the work of each request that it has outstanding."""

    def sync(self, reports: Mapping[str, Report | None]) -> None:
        """The controller's view: the replicas that are running, and what each last reported."""
        for replica in self._live - reports.keys():
            self._forget(replica)
        self._lost &= reports.keys()
        self._live = reports.keys() - self._lost
        for replica, report in reports.items():
            if report:
                self.observe(replica, report)

    def observe(self, replica: str, report: Report) -> None:
        """Take over what `replica` reported, unless it has left or something newer is known."""
        known = self._reports.get(replica)
        if replica not in self._live or (known and known["version"] > report["version"]):
            return
        self._reports[replica] = report
        if not known or (known["max_length"], known["service_s"]) != (report["max_length"], report["service_s"]):
            self._route(replica)

    def lose(self, replica: str) -> None:
        """`replica` died: it is never chosen again, even while the controller still lists it."""
        self._lost.add(replica)
        self._live.discard(replica)
        self._forget(replica)

    def suspect(self, replica: str) -> None:
        """`replica` cannot be reached: send it nothing until `trust` is called."""
        self._suspects.add(replica)
        self._route(replica)

    def trust(self, replica: str) -> None:
        """`replica` may be reached again; what it last reported holds, if it still lives."""
        self._suspects.discard(replica)
        self._route(replica)

    def stop_routing(self, moving: Collection[str]) -> None:
        """The planner moves these replicas, and no others: send them nothing until they are not `moving` any more."""
        changed = self._moving.symmetric_difference(moving)
        self._moving = frozenset(moving)
        for replica in changed:
            self._route(replica)

    def choose(self, length: int, budget_s: float | None, utility: float) -> str:
        """The replica for a request, counted as outstanding there until `done`.

        Raises NoRuntimeError when no replica holds the length now, DeadlineError when none can meet the budget.
        """
        replica, _, work = self._dispatcher.dispatch(length, budget_s, utility)
        self._sent.setdefault(replica, deque()).append(work)
        return replica

    def done(self, replica: str) -> None:
        """A request that `choose` sent to `replica` ended, well or not."""
        if sent := self._sent.get(replica):
            self._dispatcher.complete(replica, sent.popleft())

    def serves(self, length: int) -> bool:
        """Whether some replica holds a runtime for `length` tokens now."""
        return self._dispatcher.longest >= length

    def reports(self) -> dict[str, Report]:
        """What each live replica last said of itself."""
        return dict(self._reports)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """For people: each replica's latest report, and the requests that this process has outstanding there."""
        return {
            replica: {**report, "outstanding": len(self._sent.get(replica, ()))}
            for replica, report in self._reports.items()
        }

    def _route(self, replica: str) -> None:
        """Let the dispatcher use `replica` as it last reported, or not at all while it should get nothing."""
        report = self._reports.get(replica)
        if not report or not report["max_length"] or replica in self._moving or replica in self._suspects:
            self._dispatcher.suspend(replica)
        else:
            self._dispatcher.assign(replica, report["max_length"], ServiceCurve.constant(report["service_s"]))

    def _forget(self, replica: str) -> None:
        self._suspects.discard(replica)
        self._dispatcher.remove(replica)
        self._sent.pop(replica, None)
        self._reports.pop(replica, None)
