"""What Arlo's Algorithm 1 (§3.4) costs a thread, without a cluster."""

from __future__ import annotations

import random
import statistics
import time

from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.service_curve import ServiceCurve

_MOST_LEVELS = 8
_REPLICAS_OF_A_LEVEL = 4
_LONGEST = 512
_SLO_S = 0.15
_BUDGET_S = 0.15
_BLOCK = 10_000
"""Requests that are timed at once, and as many empty calls right after them."""

Sent = tuple[str, float, int]


class _Nothing:
    def call(self) -> None:
        pass


def cost_in_method_calls(replicas: int, load: float, requests: int, seed: int) -> float:
    """Thread CPU time of a dispatch and its completion, in calls of an empty Python method at the same time.

    `replicas` (at least 4) hold one of up to 8 lengths each; texts are log-normal (median 100 tokens), with deadlines.
    Requests complete in random order, and `load` times as many as there are replicas are outstanding all the time: 0.6
    is what replicas have that are busy for 60% of their time, and several are replicas with queues.
    """
    rng = random.Random(seed)
    levels = min(_MOST_LEVELS, replicas // _REPLICAS_OF_A_LEVEL)
    dispatcher: Dispatcher[str] = Dispatcher(_SLO_S)
    for number in range(replicas):
        max_length = _LONGEST * (number % levels + 1) // levels
        service_s = 0.6e-3 + 4.3e-3 * max_length / _LONGEST
        dispatcher.assign(f"{max_length}-{number}", max_length, ServiceCurve.constant(service_s))
    lengths = [min(_LONGEST, max(4, int(rng.lognormvariate(4.6, 0.9)))) for _ in range(requests)]
    sent = [dispatcher.dispatch(rng.choice(lengths)) for _ in range(max(1, round(load * replicas)))]
    places = [rng.randrange(len(sent)) for _ in range(requests)]

    costs = []
    for begin in range(0, requests, _BLOCK):
        ours_s = _dispatch_s(dispatcher, sent, lengths[begin : begin + _BLOCK], places[begin : begin + _BLOCK])
        costs.append(ours_s / _empty_calls_s(_BLOCK))
    return statistics.median(costs)


def _dispatch_s(dispatcher: Dispatcher[str], sent: list[Sent], lengths: list[int], places: list[int]) -> float:
    dispatch, complete = dispatcher.dispatch, dispatcher.complete
    started = time.thread_time()
    for length, place in zip(lengths, places, strict=True):
        replica, _, work = sent[place]
        sent[place] = dispatch(length, _BUDGET_S)
        complete(replica, work)
    return time.thread_time() - started


def _empty_calls_s(calls: int) -> float:
    nothing = _Nothing()
    started = time.thread_time()
    for _ in range(calls):
        nothing.call()
    return time.thread_time() - started
