"""The scheduler on a replica of its own: every rule, and hours of random load in which nothing may go wrong."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduled_replica import STEP_S, Quotas, Replica, multi_queue

from pliant.policies.llm.adapter_cache import AdapterCache, Eviction
from pliant.policies.llm.arrival_histogram import ArrivalHistogram
from pliant.policies.llm.jobs import Job
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues, ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.policies.llm.shared_memory import Again, Apart


def test_figure_9_first_phase() -> None:
    """(a): short requests fill their quota, and the fourth waits; medium and large fill theirs, and nothing is over."""
    replica = Replica(multi_queue((10, 3), (20, 4), (99, 6)), total=13)
    for key in range(4):
        replica.add(key, prompt=5)
    for key in (10, 11):
        replica.add(key, prompt=15, charge=2)
    for key in (20, 21):
        replica.add(key, prompt=50, charge=3)
    replica.step()
    assert replica.admitted == [0, 1, 2, 10, 11, 20, 21]
    assert [job.key for job in replica.scheduler.waiting()] == [3]


def test_figure_9_second_phase() -> None:
    """(b): medium requests leave some memory over; a short one takes it, and the next large one does not fit."""
    replica = Replica(multi_queue((10, 3), (20, 4), (99, 6)), total=13)
    for key in range(4):
        replica.add(key, prompt=5)
    replica.add(10, prompt=15, charge=2)
    for key in (20, 21, 22):
        replica.add(key, prompt=50, charge=3)
    replica.step()
    assert replica.admitted == [0, 1, 2, 10, 20, 21, 3]
    assert [job.key for job in replica.scheduler.waiting()] == [22]


def test_with_equal_charges_quotas_are_shares_of_the_slots() -> None:
    """Also where there is memory for more requests than slots."""
    for total in (8, 80):
        replica = Replica(multi_queue((10, total // 4 * 3), (99, total // 4)), total=total, slots=8)
        for key in range(20):
            replica.add(key, prompt=5)
            replica.add(100 + key, prompt=50)
        replica.step()
        assert Counter(key >= 100 for key in replica.admitted) == {False: 6, True: 2}


def test_a_loan_is_paid_back() -> None:
    """Short requests may take everything while there are no others; then large ones get their share, not more."""
    replica = Replica(multi_queue((10, 6), (99, 2)), total=8)
    for key in range(50):
        replica.add(key, prompt=5, output=10)
    replica.steps(3)
    assert len(replica.live) == 8
    for key in range(100, 104):
        replica.add(key, prompt=50, output=50)
    replica.steps(10)
    assert Counter(key >= 100 for key in replica.live) == {False: 6, True: 2}


def test_short_requests_do_not_wait_for_blocked_large_ones() -> None:
    """No head-of-line blocking: those pass that end before the large one could start; under FIFO they wait."""
    for queues in (multi_queue((99, 20)), Fifo[int, str]()):
        replica = Replica(queues, total=20)
        replica.add(0, charge=10, output=50)
        replica.add(1, charge=15, output=50)
        for key in range(2, 30):
            replica.add(key, charge=1, output=4)
        replica.steps(51)
        assert replica.admitted[0] == 0
        assert not replica.squashed
        if isinstance(queues, Fifo):
            assert replica.admitted[1] == 1
        else:
            assert replica.admitted[1:11] == list(range(2, 12))
            assert replica.admitted.index(1) == 29
            assert replica.head_since == {}


def test_whoever_would_hold_up_the_blocked_one_does_not_pass() -> None:
    replica = Replica(multi_queue((99, 20)), total=20)
    replica.add(0, charge=10, output=20)
    replica.add(1, charge=15, output=20)
    replica.add(2, charge=1, output=30)  # takes of the 5 that 1 will leave over
    replica.add(3, charge=5, output=21)
    replica.add(4, charge=5, output=20)
    replica.step()
    assert replica.admitted == [0, 2, 4]
    replica.steps(20)
    assert replica.admitted == [0, 2, 4, 1]
    assert replica.scheduler.stats().bypassed == 2
    assert not replica.squashed


def test_a_wrong_prediction_is_squashed() -> None:
    """2 passes as it should end before 1 can start, does not, and goes on when 1 has started; and only once."""
    replica = Replica(multi_queue((99, 20)), total=20, answers={2: 60})
    replica.add(0, charge=10, output=20)
    replica.add(1, charge=15, output=20)
    replica.add(2, charge=6, output=10)
    replica.steps(20)
    assert set(replica.live) == {2}
    assert not replica.squashed
    decisions = replica.step()
    assert decisions.squash == [2]
    assert [job.key for job in decisions.admit] == [1]
    assert replica.scheduler.waiting() == [Job(2, 21, 20, 6, None, 0, 0.0)]  # 20 tokens more to compute
    replica.steps(80)
    assert replica.squashed == [2]
    assert sorted(replica.ends) == [(0, "answered"), (1, "answered"), (2, "answered")]
    assert replica.scheduler.stats().squashed == 1


def test_one_that_is_overdue_but_in_nobodys_way_goes_on() -> None:
    replica = Replica(multi_queue((99, 20)), total=20, answers={0: 20, 2: 40})
    replica.add(0, charge=10, output=20)
    replica.add(1, charge=15, output=20)
    replica.add(2, charge=6, output=10)
    replica.steps(5)
    replica.scheduler.cancel(1, replica.now)
    replica.jobs.pop(1)
    replica.steps(40)
    assert not replica.squashed
    assert sorted(replica.ends) == [(0, "answered"), (2, "answered")]


def test_others_pass_while_an_adapter_loads() -> None:
    replica = Replica(multi_queue((99, 20)), total=20)
    replica.add(0, adapter="a", bytes=5)
    replica.add(1)
    assert replica.step().load == ["a"]
    assert replica.admitted == [1]
    replica.steps(5)
    assert replica.admitted == [1, 0]


def test_others_leave_memory_to_the_one_whose_adapter_loads() -> None:
    replica = Replica(multi_queue((99, 6)), total=6)
    replica.add(0, charge=2, adapter="a", bytes=3)
    replica.add(1, charge=2, output=50)
    replica.add(2, charge=1, output=50)
    replica.step()
    assert replica.admitted == [2]
    replica.steps(5)
    assert replica.admitted == [2, 0]


def test_first_in_first_out_blocks_at_a_load() -> None:
    replica = Replica(Fifo(), total=20)
    replica.add(0, adapter="a", bytes=5)
    replica.add(1)
    replica.steps(6)
    assert replica.admitted == [0, 1]


def test_the_adapter_of_a_blocked_request_is_loaded_meanwhile() -> None:
    replica = Replica(multi_queue((99, 20)), total=20)
    replica.add(0, charge=12, output=20)
    replica.step()
    replica.add(1, charge=10, adapter="a", bytes=5)
    assert replica.step().load == ["a"]
    replica.steps(18)
    assert replica.step().admit == [replica.jobs[1]]


def test_adapters_go_when_memory_is_needed_and_not_before() -> None:
    replica = Replica(multi_queue((99, 22)), total=22)
    for key, adapter in enumerate("abc"):
        replica.add(key, adapter=adapter, bytes=5, output=2)
    replica.steps(20)
    assert set(replica.resident) == set("abc")
    assert not replica.live
    replica.add(3, adapter="d", bytes=5)
    assert replica.step().evict == []
    replica.steps(5)
    replica.add(4, charge=8)
    assert len(replica.step().evict) == 2
    assert "d" in replica.resident


def test_without_a_cache_adapters_go_when_nobody_uses_them() -> None:
    replica = Replica(multi_queue((99, 20)), total=20, eviction="none")
    replica.add(0, adapter="a", bytes=5, output=2)
    replica.steps(7)
    assert replica.resident
    assert not replica.live
    assert replica.step().evict == ["a"]


def test_adapters_of_waiting_requests_are_spared() -> None:
    """b, which 2 waits for, stays, though it scores less; a goes. And if nothing else helps, b goes too."""
    replica = Replica(multi_queue((10, 10), (99, 4)), total=14)
    for key, adapter, bytes in ((0, "b", 2), (1, "a", 5)):
        replica.add(key, adapter=adapter, bytes=bytes, output=1)
    replica.steps(8)
    replica.add(10, prompt=50, charge=4, output=100)
    replica.step()
    replica.add(2, adapter="b", bytes=2, prompt=50, charge=4)
    replica.add(3, charge=8, output=100)
    assert replica.step().evict == ["a"]
    assert replica.admitted[2:] == [10, 3]
    replica.cancel(3)
    replica.add(4, charge=10, output=100)
    assert replica.step().evict == ["b"]


def test_adapters_are_loaded_in_the_order_of_admission() -> None:
    replica = Replica(multi_queue((99, 30)), total=30, slots=1)
    replica.add(0, output=100)
    for key, adapter in enumerate("abcd", 1):
        replica.add(key, adapter=adapter, bytes=5)
    assert replica.step().load == ["a", "b"]
    replica.steps(4)
    assert replica.step().load == ["c", "d"]


def test_without_prefetching_only_what_can_run_is_loaded() -> None:
    replica = Replica(multi_queue((99, 30)), total=30, slots=1, prefetch=False)
    replica.add(0, output=100)
    replica.add(1, adapter="a", bytes=5)
    replica.steps(3)
    assert not replica.loading
    assert not replica.resident


def test_likely_adapters_take_the_place_of_those_that_nobody_used_of_late() -> None:
    """Though nothing runs, so that nobody but the clock makes the scheduler look."""
    loads: dict[float, list[str]] = {}
    for window_s in (300.0, 4.0):
        replica = Replica(multi_queue((99, 12)), total=12, histogram=ArrivalHistogram(), window_s=window_s)
        for key in range(20):
            replica.steps(40)
            replica.add(key, adapter="a", bytes=5, output=1)
            replica.steps(10)
        replica.add(100, adapter="b", bytes=10, output=1)
        replica.steps(10)
        loads[window_s] = [adapter for _ in range(25) for adapter in replica.step().load]
    assert loads == {300.0: [], 4.0: ["a"]}
    assert replica.scheduler.looks_every_s


def test_a_cache_that_keeps_nothing_loads_for_nobody() -> None:
    replica = Replica(multi_queue((99, 12)), total=12, eviction="none", histogram=ArrivalHistogram())
    for key in range(20):
        replica.add(key, adapter="a", bytes=5, output=1)
        replica.steps(50)
    assert replica.scheduler.cache.stats.loads == 20
    assert replica.scheduler.looks_every_s is None


def test_requests_that_are_squashed_count_once_as_hits_or_misses() -> None:
    replica = Replica(multi_queue((99, 20)), total=20, answers={2: 60})
    replica.add(0, charge=10, output=20)
    replica.add(1, charge=15, output=20)
    replica.add(2, charge=6, output=10, adapter="a", bytes=1)
    replica.steps(100)
    assert replica.squashed == [2]
    stats = replica.scheduler.cache.stats
    assert (stats.hits, stats.misses) == (0, 1)


def test_likely_adapters_are_loaded_into_free_memory() -> None:
    replica = Replica(multi_queue((99, 12)), total=12, histogram=ArrivalHistogram())
    for round in range(20):
        replica.add(round, adapter="a", bytes=5, output=1)
        replica.steps(10)
    replica.add(20, adapter="a", bytes=5, output=1)
    replica.step()
    replica.add(100, charge=12, output=1)
    assert replica.step().evict == ["a"]
    loads = [adapter for _ in range(10) for adapter in replica.step().load]
    assert loads == ["a"]


def test_pinned_adapters_come_first_and_stay() -> None:
    replica = Replica(multi_queue((99, 20)), total=20)
    replica.sizes["p"] = 8
    replica.scheduler.pin("p", 8)
    assert replica.step().load == ["p"]
    replica.steps(6)
    with pytest.raises(ValueError, match="needs 13 bytes, and 0 for its adapter, but only 12 of 20 bytes"):
        replica.add(0, charge=13)
    del replica.jobs[0]
    replica.add(1, charge=12, adapter="p", bytes=8)
    with pytest.raises(ValueError, match=r"of 20, 12 bytes are not pinned, and a request .* needs 12"):
        replica.scheduler.pin("q", 1)
    assert replica.step().evict == []
    assert replica.admitted == [1]


def test_whoever_waits_for_a_load_that_fails_is_named() -> None:
    replica = Replica(multi_queue((99, 20)), total=20, broken={"a"})
    for key in range(3):
        replica.add(key, adapter="a" if key < 2 else "b", bytes=5)
    replica.steps(7)
    assert replica.ends == [(0, "failed"), (1, "failed")]
    assert replica.admitted == [2]


def test_at_most_so_many_prompt_tokens() -> None:
    replica = Replica(multi_queue((10, 10), (99, 10)), total=20, prompts=16)
    for key in range(5):
        replica.add(key, prompt=9)
    assert [job.key for job in replica.step().admit] == [0, 1]
    assert [job.key for job in replica.step().admit] == [2, 3]
    replica.add(10, prompt=99)
    assert [job.key for job in replica.step().admit] == [4, 10]
    assert not any(replica.scheduler.schedule(replica.now, 10, 0))


def test_patience_ends_when_prompts_of_short_requests_are_enough_for_all_time() -> None:
    """Quotas do not help: short requests end at once."""
    replica = Replica(multi_queue((10, 10), (99, 10), patience_s=2.0), total=20, prompts=10)
    replica.add(0, prompt=99)
    for key in range(1, 40):
        replica.add(key, prompt=10, output=1)
    replica.steps(10)
    assert 0 not in replica.admitted
    assert len(replica.admitted) == 10
    replica.steps(2)
    assert 0 in replica.admitted


def test_a_key_is_there_once() -> None:
    replica = Replica(Fifo(), total=20)
    replica.add(0)
    with pytest.raises(ValueError, match="waits or runs already"):
        replica.add(0)
    replica.step()
    with pytest.raises(ValueError, match="waits or runs already"):
        replica.add(0)
    with pytest.raises(KeyError):
        replica.scheduler.ended(1, 0.0)
    replica.scheduler.cancel(1, 0.0)


def test_nothing_is_done_as_long_as_nothing_happens() -> None:
    queues = multi_queue((99, 20))
    replica = Replica(queues, total=20)
    replica.add(0, charge=20)
    replica.add(1, charge=20)
    replica.step()
    queues.lanes = ()  # whoever looks at the queues now finds nothing
    assert not any(replica.scheduler.schedule(replica.now, 10, 10))


def orders(name: str) -> Queues[int, str]:
    if name == "multi_queue":
        return MultiQueue(QueueClasses(slo_s=10.0, period_s=120.0), patience_s=1.0)
    return Fifo() if name == "fifo" else ShortestFirst(ageing=4.0)


class Clients:
    """Random requests for a replica: mostly short ones, and in bursts more than it can take."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rng = random.Random(seed)
        self.sizes = {str(number): self.rng.choice([1, 2, 4, 8, 16]) for number in range(40)}
        self.longest = 0
        """Tokens of an answer, or predicted ones."""
        self.sent = 0
        self._rate = rate
        self._next_s = 0.0

    def send(self, replica: Replica) -> None:
        """What has come until now."""
        while self._next_s <= replica.now:
            burst = 3.0 if int(self._next_s / 60) % 5 == 4 else 0.8
            self._next_s += self.rng.expovariate(self._rate * burst)
            self._request(replica)

    def _request(self, replica: Replica) -> None:
        rng = self.rng
        adapter = str(min(39, int(rng.paretovariate(0.6)))) if rng.random() < 0.9 else ""
        large = rng.random() < 0.2
        predicted = max(1, int(rng.gauss(70, 15) if large else rng.gauss(8, 3)))
        answer = replica.answers[self.sent] = max(1, int(predicted * rng.choice([0.3, 0.8, 1, 1, 1.2, 2])))
        self.longest = max(self.longest, predicted, answer)
        prompt, charge = rng.randint(200, 400) if large else rng.randint(1, 50), rng.randint(6, 12) if large else 2
        replica.add(self.sent, predicted, charge, adapter, self.sizes.get(adapter, 0), prompt)
        self.sent += 1

    def cancel_one(self, replica: Replica) -> None:
        """Any of those that wait or run."""
        replica.cancel(self.rng.choice(list(replica.jobs)))


def bound_s(replica: Replica, classes: int, run_s: float, load_s: float) -> float:
    """For how long the first of a queue waits at the most, as `request_scheduler` says."""
    if replica.queues.strict:
        return run_s + 2 * load_s
    return run_s + replica.queues.patience_s + 2 * classes * (run_s + 2 * load_s)


@pytest.mark.parametrize("quotas", [[(99, 20)], [(10, 12), (99, 8)], [(10, 20), (99, 0)]])
@pytest.mark.parametrize(("large", "slots", "prompts"), [(18, 1000, 1000), (1, 6, 1000), (1, 1000, 10)])
def test_a_large_request_gets_its_turn(quotas: Quotas, large: int, slots: int, prompts: int) -> None:
    """However many short ones come, and whether memory, slots or prompt tokens are short; with or without a quota."""
    replica = Replica(multi_queue(*quotas), total=20, slots=slots, prompts=prompts)
    rng = random.Random(0)
    for key in range(1000):
        if key == 100:
            replica.add(-1, output=30, charge=large - 1, adapter="a", bytes=2, prompt=99)
        while len(replica.jobs) < 30:
            replica.add(rng.getrandbits(60), output=rng.randint(1, 20), charge=rng.randint(1, 4), prompt=5)
        replica.step()
        if -1 in replica.admitted:
            break
    assert replica.now - 100 * STEP_S <= bound_s(replica, len(quotas), run_s=31 * STEP_S, load_s=1.0 + STEP_S)


@pytest.mark.parametrize(
    ("name", "queues", "rate", "eviction"),
    [
        ("many queues", MultiQueue(QueueClasses(slo_s=10.0, period_s=120.0)), 0.9, "compound"),
        ("many queues, no cache", MultiQueue(QueueClasses(slo_s=10.0, period_s=120.0)), 0.8, "none"),
        ("in order", Fifo(), 0.7, "compound"),
        ("shortest first", ShortestFirst(ageing=4.0), 0.7, "lru"),
    ],
)
def test_an_hour_of_random_load(name: str, queues: Queues[int, str], rate: float, eviction: Eviction) -> None:
    """Nothing is over-allocated, nothing evicted that is in use, nobody starves, and every request ends once.

    With adapters of random sizes, of which some cannot be loaded, with wrong predictions and with cancellations. What
    must hold at any time, `Replica` asserts in each step.
    """
    clients = Clients(seed=len(name), rate=rate)
    replica = Replica(queues, 60, lambda adapter: 0.1 * clients.sizes[adapter], eviction, slots=25, prompts=500)
    replica.broken = {"7", "31"}
    classes = 1
    while replica.now < 3600 or replica.jobs:
        if replica.now < 3600:
            clients.send(replica)
        if replica.jobs and clients.rng.random() < 0.01:
            clients.cancel_one(replica)
        replica.step()
        classes = max(classes, len(queues.lanes))
        if clients.rng.random() < 0.05:
            replica.scheduler.check()

    ends = Counter(key for key, _ in replica.ends)
    assert ends == Counter(range(clients.sent))
    assert clients.sent > 2000
    assert not replica.live
    assert not replica.scheduler.waiting()
    if not isinstance(queues, ShortestFirst):  # whose head another may become
        bound = bound_s(replica, classes, run_s=(clients.longest + 1) * STEP_S, load_s=16 * 0.1 + STEP_S)
        assert replica.longest_head_wait_s <= bound
    stats = replica.scheduler.stats()
    assert stats.squashed == len(replica.squashed) == len(set(replica.squashed)) < 0.05 * clients.sent
    assert bool(stats.squashed) == (stats.bypassed > 100) == (classes > 1) == (not queues.strict)


def running(*charges: int, total: int) -> Scheduler[int, str]:
    """Requests 0, 1, ... that came in this order, one byte for each token of their answers to come."""
    scheduler: Scheduler[int, str] = Scheduler(Fifo(), AdapterCache(), total)
    for key, charge in enumerate(charges):
        scheduler.add(Job(key, 1, charge, charge, None, 0, float(key)), float(key))
    assert [job.key for job in scheduler.schedule(10.0, 10, 100).admit] == [*range(len(charges))]
    return scheduler


def test_an_answer_longer_than_predicted_takes_what_is_free_and_then_from_those_that_came_last() -> None:
    scheduler = running(3, 3, 3, total=10)
    assert not scheduler.extend(0, 4, 11.0).squash
    assert scheduler.extend(0, 6, 12.0).squash == [2]
    assert scheduler.extend(1, 4, 12.0).squash == []
    assert scheduler.extend(1, 5, 12.0).squash == [1], "nobody came later, and the first stays"
    scheduler.recharge(1, 5)
    scheduler.recharge(2, 6)
    scheduler.check()
    assert scheduler.schedule(13.0, 10, 100).admit == [], "neither fits beside the first"
    scheduler.ended(0, 14.0)
    assert [job.key for job in scheduler.schedule(15.0, 10, 100).admit] == [1]
    assert scheduler.stats().preempted == 2
    assert scheduler.stats().squashed == 0
    scheduler.check()


def test_an_adapter_that_nobody_uses_goes_before_a_request_makes_way() -> None:
    scheduler: Scheduler[int, str] = Scheduler(Fifo(), AdapterCache(), 10)
    scheduler.add(Job(0, 1, 2, 2, "a", 3, 0.0), 0.0)
    scheduler.schedule(0.0, 10, 100)
    scheduler.loaded("a", 1.0)
    scheduler.schedule(1.0, 10, 100)
    scheduler.ended(0, 2.0)
    for key in (1, 2):
        scheduler.add(Job(key, 1, 3, 3, None, 0, 2.0 + key), 2.0 + key)
    assert len(scheduler.schedule(5.0, 10, 100).admit) == 2
    decisions = scheduler.extend(1, 5, 6.0)
    assert (decisions.evict, decisions.squash) == (["a"], [])
    assert scheduler.extend(1, 8, 7.0).squash == [2]
    scheduler.check()


class Losing(Apart[int]):
    """Who makes way loses these seconds, by its key."""

    def __init__(self, seconds: list[int]) -> None:
        self.seconds = seconds

    def again(self, key: int) -> Again:
        return Again(self.seconds[key], 0)


_REQUESTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8)


@given(_REQUESTS, st.integers(0, 7), st.integers(1, 30))
def test_of_those_that_came_later_make_way_whose_memory_takes_least_to_compute_again(
    requests: list[tuple[int, int]], key: int, more: int
) -> None:
    """Against brute force; with what it gets, `key` goes on, or it has no place beside those that came before it."""
    charges, seconds = ([*column] for column in zip(*requests, strict=True))
    key %= len(requests)
    total = sum(charges)
    charge = min(charges[key] + more, total)
    scheduler = running(*charges, total=total)
    scheduler.share(Losing(seconds))
    made_way = scheduler.extend(key, charge, 20.0).squash
    scheduler.check()
    later = sorted(range(key + 1, len(requests)), key=lambda one: (seconds[one] / charges[one], -one))
    expected: list[int] = []
    while sum(charges[one] for one in expected) < charge - charges[key]:
        expected.append(later.pop(0) if later else key)
        if expected[-1] == key:
            break
    assert made_way == expected
    assert 0 not in made_way


@given(_REQUESTS, st.integers(0, 7), st.integers(1, 30), st.integers(0, 5))
def test_who_outgrows_its_memory_waits_where_another_ends_before_that_is_computed_again(
    requests: list[tuple[int, int]], key: int, more: int, step_s: int
) -> None:
    """Against brute force: victims in order, each against the first of the others to end as predicted."""
    charges, seconds = ([*column] for column in zip(*requests, strict=True))
    key %= len(requests)
    total = sum(charges)
    charge = min(charges[key] + more, total)
    scheduler = running(*charges, total=total)
    scheduler.share(Losing(seconds))
    extension = scheduler.extend(key, charge, 20.0, float(step_s))
    scheduler.check()
    later = sorted(range(key + 1, len(requests)), key=lambda one: (seconds[one] / charges[one], -one))
    expected: list[int] = []
    waits = False
    while sum(charges[one] for one in expected) < charge - charges[key]:
        victim = later.pop(0) if later else key
        others = [charges[one] * step_s for one in range(len(requests)) if one != key and one not in expected]
        waits = key > 0 and seconds[victim] > min(others)
        if waits:
            break
        expected.append(victim)
        if victim == key:
            break
    assert (extension.squash, extension.waits) == (expected, waits)
    assert key > 0 or not extension.waits


class Together:
    """All requests share so many bytes."""

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self.running: set[int] = set()

    @property
    def saved(self) -> int:
        return self.bytes * max(0, len(self.running) - 1)

    def saves(self, key: int) -> int:
        return self.bytes if self.running else 0

    def again(self, key: int) -> Again:
        return Again(0.0, self.bytes)

    def begin(self, key: int, now: float) -> None:
        self.running.add(key)

    def end(self, key: int, now: float) -> None:
        self.running.remove(key)


def test_what_requests_share_is_counted_once() -> None:
    scheduler: Scheduler[int, str] = Scheduler(Fifo(), AdapterCache(), 10)
    shared = Together(4)
    scheduler.share(shared)
    for key in range(5):
        scheduler.add(Job(key, 1, 5, 6, None, 0, 0.0), 0.0)
    assert [job.key for job in scheduler.schedule(0.0, 10, 100).admit] == [0, 1, 2]
    assert scheduler.used == 4 + 3 * 2
    scheduler.check()
    scheduler.ended(0, 1.0)
    assert scheduler.used == 4 + 2 * 2
    assert [job.key for job in scheduler.schedule(2.0, 10, 100).admit] == [3]
    for key in (1, 2, 3):
        scheduler.ended(key, 3.0)
    assert (scheduler.used, shared.running) == (0, set())
    scheduler.check()
