"""What one gateway process knows of a service's replicas: which may be chosen now, and what each last reported.

Plain Python, without Ray. Serve pickles a router class by value, so the router and the gateway meet in this module:
both ask `feed` for that of their service. All calls come from one event loop.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pliant.deployments.serving.parcels import Report
from pliant.deployments.serving.probing import Probe, Probes

_FAILURES = 3
"""In a row, after which a replica is left alone for a while."""
_EJECTED_S = 1.0
"""The first time; every time after that twice as long, until it answers."""
_MOST_EJECTED_S = 30.0
_UNSHOWN = "digest"
"""What of a report only choosers read."""

Want = TypeVar("Want", contravariant=True)
R = TypeVar("R", bound=Report)
ReportIn = TypeVar("ReportIn", bound=Report, contravariant=True)


class NoReplicaError(Exception):
    """There is no replica to choose, or every one is to be avoided."""


class NoTimeError(Exception):
    """Every replica is too busy, or too slow, to meet the deadline."""

    def __init__(self, retry_after_s: float, service_s: float) -> None:
        super().__init__(retry_after_s, service_s)
        self.retry_after_s = retry_after_s
        """Until one may take the same request; infinite when none ever may."""
        self.service_s = service_s
        """That the fastest replica for it takes when idle."""


class Choice(NamedTuple):
    """A replica, and when it should have answered."""

    replica: str
    predicted_s: float | None
    """From now on; None where that is unknown."""
    work: Any
    """What it has to do more by this, as the chooser counts."""


class Chooser(Protocol[Want, ReportIn]):
    """The policy that picks replicas, and counts what it has sent to each."""

    def update(self, replica: str, report: ReportIn, others: float) -> None:
        """`replica` may be chosen, is as it reports, and holds `others` of other gateways."""

    def suspend(self, replica: str) -> None:
        """Do not choose `replica` until it is updated; what it has been sent still counts."""

    def remove(self, replica: str) -> None:
        """`replica` is gone."""

    def share(self, me: str, gateways: Collection[str]) -> None:
        """These gateways, of which this is `me`, send to the same replicas, and hear late of what the others send."""

    def choose(self, want: Want, avoid: Collection[str]) -> Choice:
        """The replica for `want`, none of `avoid`; the work counts there until `done`.

        Raises NoReplicaError when there is none, and NoTimeError when none can meet the deadline.
        """

    def done(self, choice: Choice) -> None:
        """What was sent by `choice` ended, well or not."""


@dataclass
class _Health:
    failures: int = 0
    """In a row."""
    ejections: int = 0
    """Since it last answered."""
    until: float = 0.0
    """When it may be chosen again, if it is ejected."""


class ReplicaTable(Generic[Want, R]):
    """The replicas that are known to live. `chooser` hears of no others, nor of those that should get nothing now.

    A replica that fails `_FAILURES` times in a row is ejected for a time, which doubles until it answers; not the last
    one that may be chosen, as a bad one is better than none.
    """

    def __init__(self, chooser: Chooser[Want, R], now: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.gateway = uuid.uuid4().hex
        """Names this process to the replicas, which report by gateway what they hold."""
        self.chooser = chooser
        self.starts_within_s = 0.0
        """What a replica that starts now still takes, as the planner last said; 0: it has not."""
        self._now = now
        self._live: set[str] = set()
        self._lost: set[str] = set()
        self._suspects: set[str] = set()
        self._moving: frozenset[str] = frozenset()
        self._reports: dict[str, R] = {}
        self._health: dict[str, _Health] = {}
        self._ejected: set[str] = set()
        self._outstanding: Counter[str] = Counter()
        """Calls of this process that have not ended."""
        self._usable: set[str] = set()
        """Known to the chooser now."""
        self._probes: Probes | None = None

    def probe_with(self, probe: Probe) -> None:
        """Have replicas that are doubted called by `probe`, in the loop that runs then."""
        self._probes = Probes(probe, self)

    def sync(self, reports: Mapping[str, R | None]) -> None:
        """The controller's view: the replicas that are running, and what each last reported."""
        self._lost &= reports.keys()
        for replica in self._live - reports.keys():
            self._forget(replica)
        self._live = reports.keys() - self._lost
        for replica, report in reports.items():
            if report:
                self.observe(replica, report)

    def observe(self, replica: str, report: R) -> None:
        """Take over what `replica` reported, unless it has left or something newer is known."""
        known = self._reports.get(replica)
        if replica not in self._live or (known and known["version"] > report["version"]):
            return
        self._reports[replica] = report
        self._route(replica)

    def lose(self, replica: str) -> None:
        """`replica` died: it is never chosen again, even while the controller still lists it."""
        self._lost.add(replica)
        self._live.discard(replica)
        self._forget(replica)

    def suspect(self, replica: str) -> None:
        """`replica` cannot be reached: choose it no more until `trust` is called."""
        self._suspects.add(replica)
        self._route(replica)

    def trust(self, replica: str) -> None:
        """`replica` may be reached again, if it still lives."""
        self._suspects.discard(replica)
        self._route(replica)

    def doubt(self, replica: str) -> None:
        """`replica` lets a request wait: it is called, and suspected unless it answers soon."""
        if self._probes and replica in self._live:
            self._probes.doubt(replica)

    def suspected(self, replica: str) -> bool:
        """Whether `replica` is not chosen because it cannot be reached."""
        return replica in self._suspects

    def stop_routing(self, moving: Collection[str]) -> None:
        """The planner moves these replicas, and no others: choose them no more until they are not `moving`."""
        changed = self._moving.symmetric_difference(moving)
        self._moving = frozenset(moving)
        for replica in changed:
            self._route(replica)

    def choose(self, want: Want, avoid: Collection[str] = ()) -> Choice:
        """As `Chooser.choose`."""
        self._readmit()
        choice = self.chooser.choose(want, avoid)
        self._outstanding[choice.replica] += 1
        return choice

    def done(self, choice: Choice) -> None:
        """As `Chooser.done`."""
        self.chooser.done(choice)
        if choice.replica in self._outstanding:
            self._outstanding[choice.replica] -= 1

    def answered(self, replica: str) -> None:
        """`replica` did what it was asked for."""
        if self._health.pop(replica, None) and replica in self._ejected:
            self._ejected.discard(replica)
            self._route(replica)

    def failed(self, replica: str) -> None:
        """`replica` broke down over a request, or let it wait for much too long."""
        if replica not in self._live:
            return
        health = self._health.setdefault(replica, _Health())
        health.failures += 1
        if health.failures >= _FAILURES and replica not in self._ejected and self._usable - {replica}:
            health.until = self._now() + min(_MOST_EJECTED_S, _EJECTED_S * 2**health.ejections)
            health.ejections += 1
            self._ejected.add(replica)
            self._route(replica)

    def let_in(self, failed: Collection[str]) -> None:
        """Let those that are ejected be chosen again, if all others that may be have `failed` a request."""
        if not self._usable.difference(failed):
            self._readmit(self._ejected.difference(failed))

    def usable(self, replica: str) -> bool:
        """Whether `replica` may be chosen now."""
        return replica in self._usable

    @property
    def ready(self) -> bool:
        """Whether some replica may be chosen now."""
        self._readmit()
        return bool(self._usable)

    @property
    def running(self) -> int:
        """Replicas that have reported."""
        return len(self._reports)

    def runs_another(self, replicas: Collection[str]) -> bool:
        """Whether a replica runs that is none of these, though it may be that it cannot be chosen now."""
        return bool(self._reports.keys() - replicas)

    def reports(self) -> dict[str, R]:
        """What each live replica last said of itself."""
        return dict(self._reports)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """For people: each replica's latest report, the calls of this process there, and whether it is ejected."""
        self._readmit()
        return {
            replica: {
                **{key: value for key, value in report.items() if key != _UNSHOWN},
                "outstanding": self._outstanding[replica],
                "ejected": replica in self._ejected,
            }
            for replica, report in self._reports.items()
        }

    def _readmit(self, early: Collection[str] = ()) -> None:
        """Let those be chosen again whose time has come, and the `early` ones; one more failure ejects them again.

        All of them when there is no other: the last of those that did not fail may have left meanwhile.
        """
        if not self._ejected:
            return
        now = self._now()
        alone = not self._usable
        for replica in [each for each in self._ejected if alone or each in early or self._health[each].until <= now]:
            self._health[replica].failures = _FAILURES - 1
            self._ejected.discard(replica)
            self._route(replica)

    def _route(self, replica: str) -> None:
        """Let `replica` be chosen as it last reported, or not at all while it should get nothing."""
        if replica not in self._live:
            return
        report = self._reports.get(replica)
        if not report or replica in self._moving or replica in self._suspects or replica in self._ejected:
            self._usable.discard(replica)
            self.chooser.suspend(replica)
        else:
            self._usable.add(replica)
            held = report["held"]
            self.chooser.update(replica, report, sum(held.values()) - held.get(self.gateway, 0.0))

    def _forget(self, replica: str) -> None:
        if self._probes:
            self._probes.drop(replica)
        for group in (self._suspects, self._ejected, self._usable):
            group.discard(replica)
        self._health.pop(replica, None)
        self._reports.pop(replica, None)
        self._outstanding.pop(replica, None)
        self.chooser.remove(replica)


class Feed:
    """What this process's router hears of a service's replicas, for the one table that follows it, if any does."""

    def __init__(self) -> None:
        self._running: Mapping[str, Any] = {}
        self._table: ReplicaTable[Any, Any] | None = None
        self._probe: Probe = _reached

    def follow(self, table: ReplicaTable[Any, Any]) -> None:
        """Keep `table` true from now on."""
        self._table = table
        table.probe_with(lambda replica: self._probe(replica))
        table.sync(self._running)

    def probe_with(self, probe: Probe) -> None:
        """As `ReplicaTable.probe_with`, of whichever table follows."""
        self._probe = probe

    def sync(self, reports: Mapping[str, Any]) -> None:
        """As `ReplicaTable.sync`."""
        self._running = reports
        if self._table:
            self._table.sync(reports)

    def lose(self, replica: str) -> None:
        """As `ReplicaTable.lose`."""
        if self._table:
            self._table.lose(replica)

    def suspect(self, replica: str) -> None:
        """`replica` cannot be reached: choose it no more until it answers a call."""
        if self._table:
            self._table.suspect(replica)
            self._table.doubt(replica)


async def _reached(_replica: str) -> None:
    """Nobody says that a replica cannot be."""


_feeds: dict[str, Feed] = {}


def feed(service: str) -> Feed:
    """The process's own, of `service`."""
    return _feeds.setdefault(service, Feed())
