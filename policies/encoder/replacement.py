"""Instance replacement: from what the replicas hold to a new allocation, with the fewest changes (Arlo §4).

`batches` first finds who is to hold what, then in which order they change over.

A replica that holds a length that is wanted keeps it, as far as replicas of that length are wanted; every other one
changes exactly once. That is the fewest as long as everyone can load everything. A replica may be barred from lengths
that it failed to load: then keepers may have to give way, and the assignment is a bipartite matching that grows by
shortest augmenting paths, measured in changes. Replicas that hold and are barred from the same are interchangeable, so
paths run over such groups, and the rest is quick for thousands of replicas.

A small batch changes at once, and no length is lost meanwhile that the allocation wants. Only the first batch need be
carried out before asking again: the changes that remain are then one batch fewer, and none is taken back. (Were one
taken back, the old assignment could have been reached with fewer changes.)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R", bound=Hashable)

_ROUNDING = 1e-9


def batches(
    holds: Mapping[R, int],
    counts: Mapping[int, int],
    busy: Mapping[R, int] | None = None,
    barred: Mapping[R, Collection[int]] | None = None,
    share: float = 0.1,
) -> list[dict[R, int]]:
    """The changes that lead from `holds` to `counts`, in batches: each maps replicas to the max_length to load.

    `holds` maps each replica to the max_length it holds, 0 for none, and `counts` each max_length to the number of
    replicas that shall hold it, as many as there are replicas in all. `busy` has the replicas' outstanding requests:
    where there is a choice, the least busy change, and change first, after those that hold nothing yet; among equals,
    the order of `holds` decides.
    `barred` has the lengths that a replica must not be told to load; it may keep one that it holds. What `counts` asks
    for and nobody can load is left out, first of all from the shorter lengths, and the replicas left over stay as they
    are.

    A batch has at most `share` of the replicas, but at least one. When nobody holds the greatest length of `counts`,
    the first batch brings it. For the rest, a batch takes at most half of a length's holders, and a sole holder only
    when no other replica has yet to come to that length.

    Raises ValueError for counts that do not sum to the number of replicas, or arguments out of range.
    """
    if sum(counts.values()) != len(holds) or any(length < 1 or count < 0 for length, count in counts.items()):
        raise ValueError(f"counts must sum to the {len(holds)} replicas, by positive lengths, got {dict(counts)}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    idle_first = sorted(holds, key=lambda replica: busy.get(replica, 0)) if busy else list(holds)
    assigned = _Assignment(holds, counts, idle_first, barred or {}).changes()
    order = sorted((replica for replica in idle_first if replica in assigned), key=lambda replica: holds[replica] > 0)
    longest = max((length for length, count in counts.items() if count), default=0)
    size = max(1, math.floor(share * len(holds) + _ROUNDING))
    return _in_batches({replica: assigned[replica] for replica in order}, holds, longest, size)


class _Group(NamedTuple):
    """Replicas that hold the same length and are barred from the same ones."""

    held: int
    barred: frozenset[int]

    def cost(self, length: int) -> int | None:
        """Changes that one of the group needs to hold `length`; None when it cannot."""
        if length == self.held:
            return 0
        return None if length in self.barred else 1


class _Assignment(Generic[R]):
    """Who is to hold what: as much of `counts` as possible, longer lengths before shorter, with the fewest changes."""

    def __init__(
        self,
        holds: Mapping[R, int],
        counts: Mapping[int, int],
        idle_first: list[R],
        barred: Mapping[R, Collection[int]],
    ) -> None:
        self._members: dict[_Group, list[R]] = defaultdict(list)
        """By group, the least busy first."""
        self._placed: dict[_Group, Counter[int]] = defaultdict(Counter)
        """How many of a group are to hold each length."""
        everything: frozenset[int] = frozenset()
        kept: Counter[int] = Counter()
        for replica in reversed(idle_first):
            held = holds[replica]
            group = _Group(held, frozenset(barred[replica]) if replica in barred else everything)
            self._members[group].append(replica)
            if kept[held] < counts.get(held, 0):
                kept[held] += 1
                self._placed[group][held] += 1
        for members in self._members.values():
            members.reverse()
        self._free = {
            group: len(self._members[group]) - self._placed[group].total() for group in reversed(self._members)
        }
        falling = sorted(counts, reverse=True)
        missing = {length: counts[length] - kept[length] for length in falling}
        nothing_first = sorted(self._free, key=lambda group: group.held > 0)
        for length in falling:
            for group in nothing_first:
                if group.cost(length) is not None:
                    taken = min(missing[length], self._free[group])
                    missing[length] -= taken
                    self._free[group] -= taken
                    self._placed[group][length] += taken
        for length in falling:
            while missing[length] and self._augment(length):
                missing[length] -= 1

    def changes(self) -> dict[R, int]:
        """The replicas that change and what they are to hold, the least busy of each group."""
        changes: dict[R, int] = {}
        for group, members in self._members.items():
            movers = iter(members)
            for length, number in self._placed[group].items():
                if length != group.held:
                    changes.update((next(movers), length) for _ in range(number))
        return changes

    def _augment(self, length: int) -> bool:
        """Place one more replica on `length`: others may change their places for it, or one leave a shorter length.

        The path of fewest changes is found as Bellman and Ford do; False when there is none.
        """
        changes = {length: 0}
        via: dict[int, tuple[int, _Group]] = {}
        """A replica of the group may go from the key's length to the other one."""
        improved = True
        while improved:
            improved = False
            for target in list(changes):
                for group, placed in self._placed.items():
                    gain = group.cost(target)
                    if gain is None:
                        continue
                    for source in [source for source, number in placed.items() if number]:
                        total = changes[target] + gain - (source != group.held)
                        if total < changes.get(source, math.inf):
                            changes[source] = total
                            via[source] = target, group
                            improved = True
        free = [
            (changes[target] + cost, -target, group)
            for group, number in self._free.items()
            if number
            for target in changes
            if (cost := group.cost(target)) is not None
        ]
        if free:
            _, negated, group = min(free, key=lambda end: end[:2])
            end = -negated
            self._free[group] -= 1
            self._placed[group][end] += 1
        else:
            end = min(changes)
        found = bool(free) or end != length
        while end != length:
            target, group = via[end]
            self._placed[group][end] -= 1
            self._placed[group][target] += 1
            end = target
        return found


def _in_batches(changes: Mapping[R, int], holds: Mapping[R, int], longest: int, size: int) -> list[dict[R, int]]:
    """The changes, in their order, in batches of at most `size`, with the rules of `batches`.

    Sole holders cannot all wait for one another: they would form a ring, which keeping everyone in place would save.
    """
    holders = Counter(holds.values())
    pending = dict(changes)
    listed: list[dict[R, int]] = []
    while pending:
        coming = Counter(pending.values())
        room = {held: max(holders[held] // 2, 0 if coming[held] else 1) for held in holders}
        room[0] = len(pending)
        brings = coming[longest] and not holders[longest]
        if brings:
            pending = dict(
                sorted(pending.items(), key=lambda change: (change[1] != longest, not room[holds[change[0]]]))
            )
        batch: dict[R, int] = {}
        for replica, length in pending.items():
            held = holds[replica]
            if room[held] > 0 or (brings and not batch):
                room[held] -= 1
                batch[replica] = length
            if len(batch) == size:
                break
        for replica, length in batch.items():
            del pending[replica]
            holders[holds[replica]] -= 1
            holders[length] += 1
        listed.append(batch)
    return listed
