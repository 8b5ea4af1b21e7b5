"""Which slot holds which request, and how to close the gaps with the least to move (Flover §V-C and V-D, Algorithm 3).

A decode step computes a contiguous window of slots. Requests that end leave holes in it; compaction moves as little as
possible to make n live requests fill n neighbouring slots again: of all windows of n slots, the one that already holds
the most is kept, and what lies outside moves into its holes. Algorithm 3 slides over them in one pass.

Beyond the paper, and beside it:

- As printed, Algorithm 3 never counts its first window and charges the others for what that held. Here it is counted.
- What a slot holds is weighed in tokens, as the move costs time for every key and value, not one unit a slot.
- A request that comes while there is a hole fills it. It holds no tokens yet, so that wherever it lies it costs a later
  compaction nothing, and saves the move that would have closed the hole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R", bound=Hashable)


class SlotsFullError(Exception):
    """Every slot holds a request."""


class SlotError(Exception):
    """The map contradicts itself: a defect, after which no result may be trusted."""


class Move(NamedTuple):
    """Take the request in slot `source`, with the `size` tokens it holds, to slot `target`."""

    source: int
    target: int
    size: int


class SlotMap(Generic[R]):
    """Places requests in `slots` slots; the occupied ones lie in the window [offset, offset + count).

    With `compact`=False the window keeps its holes, as Flover's does without the shuffle; ends that fall empty are left
    out in any case.
    """

    def __init__(self, slots: int, compact: bool = True) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self.offset = 0
        self.count = 0
        self._compact = compact
        self._requests: list[R | None] = [None] * slots
        self._slots: dict[R, int] = {}

    def __len__(self) -> int:
        """Requests that have a slot."""
        return len(self._slots)

    def __contains__(self, request: R) -> bool:
        return request in self._slots

    @property
    def free(self) -> int:
        """Slots that hold no request."""
        return len(self._requests) - len(self._slots)

    def append(self, request: R) -> int:
        """Give `request` a slot: a hole in the window, or else the one behind its end or the one before its front.

        Raises SlotsFullError when no slot is free, and ValueError when the request has one already.
        """
        if request in self._slots:
            raise ValueError(f"{request!r} is in slot {self._slots[request]} already")
        if not self.free:
            raise SlotsFullError(f"all {len(self._requests)} slots hold requests")
        end = self.offset + self.count
        if self.count > len(self._slots):
            slot = self._requests.index(None, self.offset, end)
        elif end < len(self._requests):
            slot = end
            self.count += 1
        else:
            slot = self.offset = self.offset - 1
            self.count += 1
        self._requests[slot] = request
        self._slots[request] = slot
        return slot

    def evict(self, request: R) -> int:
        """Free the slot of `request`, and return it. Raises KeyError when it has none."""
        slot = self._slots.pop(request)
        self._requests[slot] = None
        self._tighten()
        return slot

    def slot(self, request: R) -> int:
        """Where `request` lies. Raises KeyError when it has no slot."""
        return self._slots[request]

    def request(self, slot: int) -> R | None:
        """What lies in `slot`."""
        return self._requests[slot]

    def window(self) -> list[R | None]:
        """The requests of the window in the order of their slots, None for holes."""
        return self._requests[self.offset : self.offset + self.count]

    def compact(self, sizes: Callable[[R], int]) -> list[Move]:
        """Close the holes; with `compact`=False, nothing.

        Returns the moves, made here already, that do it with the fewest tokens and then the fewest moves. `sizes` tells
        the tokens, at least 0, that a request holds. No slot is both a source and a target. Takes time proportional to
        the window, and none when there is nothing to do.
        """
        if self.count == len(self._slots) or not self._compact:
            return []
        kept = self._kept(sizes)
        window = range(self.offset, self.offset + self.count)
        sources = [slot for slot in window if slot not in kept and self._requests[slot] is not None]
        holes = [slot for slot in kept if self._requests[slot] is None]
        moves = [self._move(source, hole, sizes) for source, hole in zip(sources, holes, strict=True)]
        self._tighten()
        return moves

    def _kept(self, sizes: Callable[[R], int]) -> range:
        """The slots, as many as there are requests, that all requests are to lie in."""
        held = [None if request is None else sizes(request) for request in self.window()]
        first = self.offset + _fullest(held, len(self._slots))
        return range(first, first + len(self._slots))

    def _move(self, source: int, target: int, sizes: Callable[[R], int]) -> Move:
        request = self._requests[source]
        assert request is not None
        move = Move(source, target, sizes(request))
        self._requests[source], self._requests[target] = None, request
        self._slots[request] = target
        return move

    def _tighten(self) -> None:
        """Have the window begin and end with a request."""
        self.offset = min(self._slots.values(), default=0)
        self.count = max(self._slots.values(), default=-1) + 1 - self.offset

    def check(self) -> None:
        """Raise SlotError unless the two directions of the map and the window agree."""
        placed = {request: slot for slot, request in enumerate(self._requests) if request is not None}
        if placed != self._slots:
            raise SlotError(f"slots hold {placed}, but requests are said to be in {self._slots}")
        if len(placed) != sum(request is not None for request in self._requests):
            raise SlotError(f"a request is in two slots: {self._requests}")
        tight = (min(placed.values()), max(placed.values()) + 1) if placed else (0, 0)
        if (self.offset, self.offset + self.count) != tight:
            raise SlotError(f"the window is {self.offset} to {self.offset + self.count}, but requests span {tight}")


def _fullest(sizes: list[int | None], width: int) -> int:
    """Where the `width` neighbours begin that hold the largest total, of these the most requests (Algorithm 3)."""
    held = sum(size or 0 for size in sizes[:width])
    requests = sum(size is not None for size in sizes[:width])
    best, first = (held, requests), 0
    for end in range(width, len(sizes)):
        entering, leaving = sizes[end], sizes[end - width]
        held += (entering or 0) - (leaving or 0)
        requests += (entering is not None) - (leaving is not None)
        if (held, requests) > best:
            best, first = (held, requests), end - width + 1
    return first
