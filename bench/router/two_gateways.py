"""Two gateways that hear of each other by late reports, against one gateway under the same load, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence

import numpy as np

from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.service_curve import ServiceCurve
from pliant.policies.encoder.shares import shares

_SLO_S = 0.15
_HELD = {128: 6, 256: 4, 384: 2, 512: 4}
"""Of 16 replicas, those of each max_length: about what its texts need."""
_REPORT_S = 1.0
"""Each replica reports so often, and its report is as old again when it arrives."""
_WARMUP_S = 5.0


def p98_against_one(replicas: int, load: float, seconds: float, seed: int, gateways: int = 2) -> float:
    """The P98 latency of `gateways` that share Poisson arrivals, over that of one which gets them all.

    `replicas` is a multiple of 16, and `load` the share of their time that the texts would take, were each computed on
    the shortest runtime that it fits into.
    """
    one, several = (np.quantile(latencies(n, replicas, load, seconds, seed), 0.98) for n in (1, gateways))
    return float(several / one)


def service_s(max_length: int) -> float:
    """Of a static runtime: Arlo's BERT-Base."""
    return 0.6e-3 + 4.3e-3 * max_length / 512


def latencies(gateways: int, replicas: int, load: float, seconds: float, seed: int) -> Sequence[float]:
    """Seconds that each text takes when every arrival goes to a random one of `gateways`.

    Lengths are log-normal (median 100 tokens). Replicas work in order of arrival, as fast as predicted.
    """
    rng = random.Random(seed)
    lengths = [min(512, max(4, int(rng.lognormvariate(4.6, 0.9)))) for _ in range(10_000)]
    needed_s = sum(service_s(min(held for held in _HELD if held >= length)) for length in lengths) / len(lengths)
    rate = load * replicas / needed_s
    held_by = {f"{held}-{n}": held for held, count in _HELD.items() for n in range(count * replicas // 16)}
    names = [str(number) for number in range(gateways)]
    dispatchers = [_dispatcher(name, names, held_by) for name in names]
    free_at = dict.fromkeys(held_by, 0.0)
    # What happens, in order of time: a request of a gateway ends, a replica writes a report, the report arrives.
    events: list[tuple[float, int, str, int, list[float]]] = []
    for replica in held_by:
        heapq.heappush(events, (rng.uniform(0, _REPORT_S), -1, replica, 0, []))
    found = []
    now = 0.0
    while now < seconds:
        now += rng.expovariate(rate)
        while events[0][0] <= now:
            then, gateway, replica, work, held_s = heapq.heappop(events)
            if gateway >= 0:
                dispatchers[gateway].complete(replica, work)
            elif held_s:
                for dispatcher, own_s in zip(dispatchers, held_s, strict=True):
                    dispatcher.report(replica, sum(held_s) - own_s)
            else:
                held_s = [dispatcher.sent_s(replica) for dispatcher in dispatchers]
                heapq.heappush(events, (then + _REPORT_S, -1, replica, 0, []))
                heapq.heappush(events, (then + _REPORT_S, -1, replica, 0, held_s))
        gateway = rng.randrange(gateways)
        replica, _, work = dispatchers[gateway].dispatch(rng.choice(lengths))
        free_at[replica] = max(now, free_at[replica]) + work / 1e6
        heapq.heappush(events, (free_at[replica], gateway, replica, work, []))
        if now > _WARMUP_S:
            found.append(free_at[replica] - now)
    return found


def _dispatcher(name: str, names: Sequence[str], held_by: Mapping[str, int]) -> Dispatcher[str]:
    dispatcher: Dispatcher[str] = Dispatcher(_SLO_S)
    for replica, max_length in held_by.items():
        dispatcher.assign(replica, max_length, ServiceCurve.constant(service_s(max_length)))
    dispatcher.prefer(shares(held_by, names)[name])
    return dispatcher
