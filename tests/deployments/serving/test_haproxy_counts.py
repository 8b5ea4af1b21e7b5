"""What HAProxy answered itself: its numbers less those of gateways, each counted once, whoever counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_haproxy import Haproxy, numbers
from support.waiting import until

from pliant.deployments.serving import haproxy_counts
from pliant.deployments.serving.haproxy_counts import Differences, HaproxyCounts, Seen
from pliant.haproxy_numbers import Look, Numbers, keep


def level(front: int, gateways: int, running: int = 0, retried: int = 0) -> Look:
    """So many 5xx of each."""
    return Look(Numbers({"5xx": front}, {"5xx": gateways}, retried), running)


def failed(differences: Differences, seen: Look) -> int:
    return differences.of(seen).answered["5xx"]


def test_what_gateways_answer_is_not_counted() -> None:
    assert Differences({}).of(level(5, 5)) == ({"4xx": 0, "5xx": 0}, 0)


def test_what_nobody_else_answers_is() -> None:
    differences = Differences({})
    assert differences.of(level(5, 2, retried=4)) == ({"4xx": 0, "5xx": 3}, 4)
    assert differences.of(level(9, 5, retried=4)) == ({"4xx": 0, "5xx": 1}, 0)


def test_an_answer_that_is_not_whole_is_no_difference_later() -> None:
    differences = Differences({})
    assert [failed(differences, each) for each in (level(0, 2, running=2), level(2, 2), level(3, 2))] == [0, 0, 1]


def test_an_answer_that_never_became_whole_hides_nothing() -> None:
    differences = Differences({})
    assert [failed(differences, each) for each in (level(0, 2, running=2), level(0, 2), level(1, 2))] == [0, 0, 1]


def test_numbers_that_were_lost_count_nothing_again() -> None:
    differences = Differences({})
    assert [failed(differences, each) for each in (level(50, 20), level(3, 1), level(4, 1))] == [30, 0, 1]


class Counted:
    """What was counted."""

    def __init__(self) -> None:
        self.failed = self.retried = 0

    def saw(self, seen: Seen) -> None:
        self.failed += seen.answered["5xx"]
        self.retried += seen.retried


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setattr(haproxy_counts, "_EVERY_S", 0.01)
    return Counted()


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[Haproxy]:
    with Haproxy(tmp_path / "node" / "admin.sock").listening() as haproxy:
        yield haproxy


async def heard(haproxy: Haproxy) -> None:
    """Somebody has counted what it says now."""
    after = haproxy.asked + 2
    await until(lambda: haproxy.asked >= after)


async def test_one_gateway_counts_and_another_goes_on(haproxy: Haproxy, counted: Counted) -> None:
    gateways = [asyncio.create_task(HaproxyCounts(haproxy.path, counted).run()) for _ in range(2)]
    haproxy.says = numbers(front=3, gateways=1, redispatched=1)
    await heard(haproxy)
    assert (counted.failed, counted.retried) == (2, 1)
    gateways[0].cancel()
    await asyncio.wait(gateways[:1])
    haproxy.says = numbers(front=7, gateways=1, redispatched=1)
    await heard(haproxy)
    assert (counted.failed, counted.retried) == (6, 1)
    gateways[1].cancel()


async def test_what_happened_while_nobody_counted_is_not_lost_with_the_process(
    haproxy: Haproxy, counted: Counted
) -> None:
    haproxy.says = numbers(front=5, gateways=1)
    keep(haproxy.path)
    haproxy.says = numbers(front=1, gateways=0, pid=2)
    counting = asyncio.create_task(HaproxyCounts(haproxy.path, counted).run())
    await heard(haproxy)
    assert counted.failed == 5
    counting.cancel()


@pytest.mark.parametrize("says", ["", "Unknown command\n", "Pid: 1\n# pxname,svname\na,b\n", "\0" * 3_000_000])
async def test_what_cannot_be_read_harms_nobody(haproxy: Haproxy, counted: Counted, says: str) -> None:
    counting = asyncio.create_task(HaproxyCounts(haproxy.path, counted).run())
    haproxy.says = says
    await heard(haproxy)
    haproxy.says = numbers(front=1, gateways=0)
    await heard(haproxy)
    assert counted.failed == 1
    counting.cancel()
