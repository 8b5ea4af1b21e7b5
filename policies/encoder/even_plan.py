"""The plan for a pool whose demand is not known yet: every length alike, the longest first."""

from __future__ import annotations

from collections.abc import Sequence


def even_plan(lengths: Sequence[int], replicas: int) -> tuple[int, ...]:
    """The max_length that each replica, by rank, should hold.

    Rank 0 holds the longest, so that every text can be served from the first replica on. Each further round of ranks
    goes through all lengths once, so their counts differ by at most one; within a round each rank falls into the middle
    of a gap that the earlier ranks left (van der Corput's order), so a few replicas already span the whole range. More
    replicas never change what the earlier ranks hold.

    Raises ValueError when there is no length to hold or `replicas` is negative.
    """
    if not lengths or replicas < 0:
        raise ValueError(f"needs at least one length and no negative number of replicas, got {lengths} and {replicas}")
    falling = sorted(set(lengths), reverse=True)
    bits = (len(falling) - 1).bit_length()
    order = sorted(range(len(falling)), key=lambda index: f"{index:0{bits}b}"[::-1])
    return tuple(falling[order[rank % len(falling)]] for rank in range(replicas))
