"""Orders of waiting, and that the shortest first starves nobody (Chameleon §3.3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.llm.jobs import Job
from pliant.policies.llm.queue_order import Fifo, Lane, Queues, ShortestFirst


def job(key: int, output: int = 1, arrived: float = 0.0) -> Job[int, str]:
    return Job(key, 1, output, 1, None, 0, arrived)


def keys(queues: Queues[int, str]) -> list[int]:
    return [job.key for job in queues.waiting()]


def test_first_in_first_out() -> None:
    queues: Fifo[int, str] = Fifo()
    for key, output in enumerate([9, 1, 5]):
        queues.add(job(key, output), now=float(key))
    assert keys(queues) == [0, 1, 2]
    assert [other.key for other in queues.ahead(job(3))] == [0, 1, 2]


def test_shortest_first() -> None:
    queues: ShortestFirst[int, str] = ShortestFirst(ageing=4.0)
    for key, output in enumerate([90, 10, 50, 10]):
        queues.add(job(key, output), now=0.0)
    assert keys(queues) == [1, 3, 2, 0]
    assert [other.key for other in queues.ahead(job(4, output=50))] == [1, 3, 2]


def test_a_second_of_waiting_counts_as_tokens() -> None:
    queues: ShortestFirst[int, str] = ShortestFirst(ageing=4.0)
    queues.add(job(0, output=90), now=0.0)
    queues.add(job(1, output=11, arrived=20.0), now=20.0)
    queues.add(job(2, output=9, arrived=20.0), now=20.0)
    assert keys(queues) == [2, 0, 1]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 100)), max_size=30), st.integers(1, 500))
def test_only_those_pass_that_come_soon_after(others: list[tuple[int, float]], output: int) -> None:
    """The bound of the docstring: whoever comes later than output / ageing seconds does not pass."""
    ageing = 5.0
    queues: ShortestFirst[int, str] = ShortestFirst(ageing)
    queues.add(job(-1, output), now=0.0)
    for key, (tokens, arrived) in enumerate(others):
        queues.add(job(key, tokens, arrived), now=arrived)
    waiting = keys(queues)
    assert all(others[key][1] <= output / ageing for key in waiting[: waiting.index(-1)])


def test_ageing_must_be_there() -> None:
    with pytest.raises(ValueError, match="long requests starve"):
        ShortestFirst(ageing=0.0)


def test_a_request_alone_is_within_any_quota() -> None:
    lane: Lane[int, str] = Lane(quota=5)
    assert lane.within(9)
    lane.used = 2
    assert lane.within(3)
    assert not lane.within(4)
