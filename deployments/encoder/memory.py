"""What replicas have room for, as far as they have measured it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median

from pliant.deployments.encoder.messages import Report
from pliant.policies.encoder.planning import Residency

logger = logging.getLogger("pliant")


def residency(service: str, lengths: Collection[int], reports: Sequence[Report]) -> Residency:
    """Of replicas that report what runtimes took, and their room for them, of which the least counts.

    What else they did meanwhile may count, too, so of each length the median does. One that none has loaded is taken to
    need as much as the greatest of those that some have. Any one runtime fits, as a replica without could do nothing.
    """
    took: defaultdict[int, list[float]] = defaultdict(list)
    for report in reports:
        for length, megabytes in report.get("memory_mb", {}).items():
            took[length].append(megabytes)
    known = {length: median(each) for length, each in took.items()}
    room = min((report.get("room_mb") or 0.0 for report in reports), default=0.0)
    greatest = max(known.values(), default=max(room, 1.0))
    if greatest > room:
        logger.warning("%s: one runtime takes %.0f MB, more than the memory_mb for all, %.0f", service, greatest, room)
    memory_mb = {length: known.get(length, greatest) for length in lengths}
    return Residency(memory_mb, max(room, *memory_mb.values()))
