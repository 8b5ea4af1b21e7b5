"""Which of many batches are planned: a plan's time must stay short, whatever clients send.

A queue of up to HORIZON batches is planned as a whole. Of a longer one those are, at most so many, that are due first
of all that fit in beside each other: taken in the order of what they gain per second at best, each if it can end in
time at its fastest beside those taken before. So what waits in vain is only what is worth less time than all that is
kept, and who is due last does not wait for ever: what is due before it runs, or is too late, and then its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pliant.policies.vision.token_profile import Floats

HORIZON = 24


def horizon(now: float, latency_s: Floats, gain: Floats, due: Sequence[float]) -> list[int]:
    """The batches to plan, in the order in which they are `due`; arrays are [batch, gamma], as for `best_plan`."""
    if len(due) <= HORIZON:
        return list(range(len(due)))
    per_s = (gain / latency_s).max(axis=1)
    room = np.array(due) - now
    fastest_s = latency_s.min(axis=1)
    fitting = []
    for batch in np.argsort(-per_s, kind="stable").tolist():
        behind = room[batch:]
        if per_s[batch] > 0 and fastest_s[batch] <= behind.min():
            behind -= fastest_s[batch]
            fitting.append(batch)
    return sorted(fitting)[:HORIZON]
