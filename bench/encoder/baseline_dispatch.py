"""How the systems that Arlo is compared with choose a replica (§5, compared schemes and Table 4)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from pliant.policies.encoder.service_curve import ServiceCurve

_ROUNDING = 1e-9


class Level:
    """The replicas of one max_length by their outstanding requests; among equals the one that waited longest leads."""

    def __init__(self, max_length: int, service_s: float) -> None:
        self.max_length = max_length
        self.service_s = service_s
        self.rings: list[OrderedDict[int, None]] = [OrderedDict()]
        """By number of outstanding requests."""
        self.lowest = 0
        """The first ring that is not empty."""
        self.size = 0
        self.full = 0
        """From this many outstanding requests on, a replica has no room (`Packing`)."""

    def attach(self, replica: int, outstanding: int) -> None:
        while len(self.rings) <= outstanding:
            self.rings.append(OrderedDict())
        self.rings[outstanding][replica] = None
        self.lowest = min(self.lowest, outstanding) if self.size else outstanding
        self.size += 1

    def detach(self, replica: int, outstanding: int) -> None:
        del self.rings[outstanding][replica]
        self.size -= 1
        while self.size and not self.rings[self.lowest]:
            self.lowest += 1

    @property
    def wait_s(self) -> float:
        """How long a request waits at the least busy replica."""
        return self.lowest * self.service_s


class BaselineDispatcher:
    """Has the interface of `policies.dispatch.Dispatcher`; what differs between baselines is `choose`."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        """Requests that were dispatched to each max_length."""
        self._levels: dict[int, Level] = {}
        self._level_of: dict[int, Level] = {}
        self._outstanding: dict[int, int] = {}
        self._candidates: list[list[Level]] = []
        """By length: the levels that it fits into, in rising max_length."""

    def choose(self, levels: Sequence[Level]) -> tuple[Level, int]:
        """A level, and how many outstanding requests the replica shall have that is taken from it."""
        raise NotImplementedError

    def assign(self, replica: int, max_length: int, curve: ServiceCurve) -> None:
        self.suspend(replica)
        level = self._levels.setdefault(max_length, Level(max_length, curve.seconds(max_length)))
        self._level_of[replica] = level
        level.attach(replica, self._outstanding.setdefault(replica, 0))
        self._list_candidates()

    def suspend(self, replica: int) -> None:
        level = self._level_of.pop(replica, None)
        if level is None:
            return
        level.detach(replica, self._outstanding[replica])
        if not level.size:
            del self._levels[level.max_length]
        self._list_candidates()

    def remove(self, replica: int) -> None:
        self.suspend(replica)
        self._outstanding.pop(replica, None)

    def dispatch(self, length: int, budget_s: float | None = None) -> tuple[int, float, int]:
        """As the baselines do not refuse, `budget_s` is ignored."""
        level, outstanding = self.choose(self._candidates[length])
        replica, _ = level.rings[outstanding].popitem(last=False)
        level.size -= 1
        self._outstanding[replica] = outstanding + 1
        level.attach(replica, outstanding + 1)
        while not level.rings[level.lowest]:
            level.lowest += 1
        self.sent[level.max_length] += 1
        return replica, (outstanding + 1) * level.service_s, 1

    def complete(self, replica: int, work: int) -> None:
        outstanding = self._outstanding[replica]
        self._outstanding[replica] = outstanding - 1
        level = self._level_of.get(replica)
        if level is not None:
            level.detach(replica, outstanding)
            level.attach(replica, outstanding - 1)

    def _list_candidates(self) -> None:
        self._candidates = []
        rising = [level for _, level in sorted(self._levels.items())]
        for index, level in enumerate(rising):
            self._candidates += [rising[index:]] * (level.max_length + 1 - len(self._candidates))


class LeastBusy(BaselineDispatcher):
    """Inter-groups greedy: of all replicas that the request fits into, the one at which it waits least."""

    def choose(self, levels: Sequence[Level]) -> tuple[Level, int]:
        best = levels[0]
        for level in levels:
            if level.lowest * level.service_s < best.lowest * best.service_s:
                best = level
        return best, best.lowest


class Packing(BaselineDispatcher):
    """INFaaS's bin packing: the fullest replica that has room, in the shortest length where one has.

    A replica has room for a request that it would answer within `room_s` seconds, and always for a second one: less
    would not be packing. When none has room, the request goes where it waits least.
    """

    def __init__(self, room_s: float) -> None:
        super().__init__()
        self._room_s = room_s

    def assign(self, replica: int, max_length: int, curve: ServiceCurve) -> None:
        super().assign(replica, max_length, curve)
        level = self._levels[max_length]
        level.full = max(2, int(self._room_s / level.service_s + _ROUNDING))

    def choose(self, levels: Sequence[Level]) -> tuple[Level, int]:
        for level in levels:
            if level.lowest < level.full:
                rings = level.rings
                for outstanding in range(min(level.full, len(rings)) - 1, -1, -1):
                    if rings[outstanding]:
                        return level, outstanding
        best = min(levels, key=lambda level: level.wait_s)
        return best, best.lowest
