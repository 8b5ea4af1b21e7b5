"""Chameleon's queues: who belongs where, in which order they are likely to go, and what happens when classes change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.llm.jobs import Job
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClass, QueueClasses

Jobs = list[Job[int, str]]


class Classes(QueueClasses):
    """Two classes: up to `longest` prompt tokens, and the others; learned when it is said."""

    def __init__(self, quotas: list[int], longest: int = 10) -> None:
        super().__init__(slo_s=1.0)
        self.quotas = quotas
        self.longest = longest
        self.is_due = True
        self.seen: list[tuple[float, ...]] = []

    def due(self, now: float) -> bool:
        return self.is_due

    def observe(self, now: float, prompt: int, output: int, adapter_bytes: int, charge: int) -> None:
        self.seen.append((now, prompt, output, adapter_bytes, charge))

    def ended(self, prompt: int, output: int, adapter_bytes: int, seconds: float) -> None:
        self.seen.append((prompt, output, adapter_bytes, seconds))

    def classify(self, prompt: int, output: int, adapter_bytes: int) -> int:
        return int(prompt > self.longest and len(self.quotas) > 1 and not self.is_due)

    def learn(self, now: float, total: int) -> list[QueueClass]:
        self.is_due = False
        return [QueueClass(self.longest, quota) for quota in self.quotas]


def job(key: int, prompt: int = 1, output: int = 10, charge: int = 1) -> Job[int, str]:
    return Job(key, prompt, output, charge, "a", 1, float(key))


def filled(classes: Classes, jobs: Jobs) -> MultiQueue[int, str]:
    queues: MultiQueue[int, str] = MultiQueue(classes)
    assert queues.refresh(0.0, 100)
    for one in jobs:
        queues.add(one, one.arrived)
    return queues


def test_small_requests_have_a_queue_of_their_own() -> None:
    queues = filled(Classes([4, 4]), [job(0, prompt=99), job(1), job(2, prompt=50), job(3)])
    assert [[one.key for one in lane.jobs] for lane in queues.lanes] == [[1, 3], [0, 2]]
    assert [lane.quota for lane in queues.lanes] == [4, 4]
    assert [lane.index for lane in queues.lanes] == [0, 1]


def test_a_class_that_is_alone_has_no_quota() -> None:
    queues = filled(Classes([4]), [job(0)])
    queues.lanes[0].used = 100
    assert queues.lanes[0].within(100)


def test_all_move_when_there_are_other_classes() -> None:
    """In order of arrival again."""
    classes = Classes([4, 4])
    queues = filled(classes, [job(0, prompt=99), job(1), job(2, prompt=50), job(3)])
    assert not queues.refresh(1.0, 100)
    classes.is_due, classes.longest = True, 60
    assert queues.refresh(2.0, 100)
    assert [[one.key for one in lane.jobs] for lane in queues.lanes] == [[1, 2, 3], [0]]


def test_queues_take_turns_as_their_quotas_have_it() -> None:
    """Of the same work, three small ones go for one large one; the heads go at once."""
    queues = filled(Classes([30, 10]), [job(key) for key in range(6)] + [job(key, prompt=99) for key in range(10, 13)])
    assert [one.key for one in queues.waiting()] == [0, 10, 1, 2, 3, 11, 4, 5, 12]


def test_who_is_ahead() -> None:
    queues = filled(Classes([30, 10]), [job(key) for key in range(6)] + [job(key, prompt=99) for key in range(10, 13)])
    assert [one.key for one in queues.ahead(job(20))] == [0, 10, 1, 2, 3, 11, 4, 5]
    assert len(queues.ahead(job(20, prompt=99))) == 9


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 50), st.integers(1, 5))))
def test_all_that_wait_are_named_once_and_each_queue_in_order(requests: list[tuple[int, int, int]]) -> None:
    jobs = [job(key, *request) for key, request in enumerate(requests)]
    queues = filled(Classes([7, 3]), jobs)
    waiting = list(queues.waiting())
    assert sorted(one.key for one in waiting) == list(range(len(jobs)))
    for lane in queues.lanes:
        assert [one for one in waiting if one in lane.jobs] == lane.jobs
    new = job(1000, prompt=5)
    assert queues.lanes[0].jobs == [one for one in queues.ahead(new) if one.prompt <= 10]


def test_classes_learn_from_what_comes_and_ends() -> None:
    classes = Classes([4, 4])
    queues = filled(classes, [job(3, prompt=9)])
    queues.ended(job(3, prompt=9), seconds=2.5)
    assert classes.seen == [(3.0, 9, 10, 1, 1), (9, 10, 1, 2.5)]


def test_patience_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="patience_s"):
        MultiQueue(Classes([4]), patience_s=-1.0)
