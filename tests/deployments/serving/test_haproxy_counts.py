"""What HAProxy answered itself: its numbers less those of gateways, each counted once, whoever counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.waiting import until

from pliant.deployments.serving import haproxy_counts
from pliant.deployments.serving.haproxy_counts import Differences, HaproxyCounts, Seen

COLUMNS = ("pxname", "svname", "scur", "bck", "hrsp_4xx", "hrsp_5xx", "wredis", "type")


def numbers(front: int, server: int, backup: int = 0, running: int = 0, redispatched: int = 0, bad: int = 0) -> str:
    """As HAProxy says them, of so many 5xx of each, and `bad` 4xx that no gateway gave."""
    rows = [
        ("http_frontend", "FRONTEND", running, "", bad, front, "", 0),
        ("pliant", "gateway-1", 0, 0, 0, server, redispatched, 2),
        ("pliant", "serve", 0, 1, 0, backup, 0, 2),
        ("pliant", "BACKEND", 0, 0, 0, server + backup, redispatched, 1),
    ]
    return "# " + "\n".join(",".join(map(str, row)) for row in (COLUMNS, *rows)) + "\n\n"


def test_what_gateways_answer_is_not_counted() -> None:
    seen = Differences().of(numbers(front=5, server=5))
    assert seen == ({"4xx": 0, "5xx": 0}, 0)


def test_what_nobody_else_answers_is() -> None:
    differences = Differences()
    assert differences.of(numbers(front=5, server=2, bad=1, redispatched=4)) == ({"4xx": 1, "5xx": 3}, 4)
    assert differences.of(numbers(front=9, server=5, bad=1, redispatched=4)) == ({"4xx": 0, "5xx": 1}, 0)


def test_what_serve_answers_without_a_gateway_is() -> None:
    assert Differences().of(numbers(front=5, server=2, backup=3)).answered["5xx"] == 3


def test_an_answer_that_is_not_whole_is_no_difference_later() -> None:
    differences = Differences()
    assert differences.of(numbers(front=0, server=2, running=2)).answered["5xx"] == 0
    assert differences.of(numbers(front=2, server=2)).answered["5xx"] == 0
    assert differences.of(numbers(front=3, server=2)).answered["5xx"] == 1


def test_an_answer_that_never_became_whole_hides_nothing() -> None:
    differences = Differences()
    differences.of(numbers(front=0, server=2, running=2))
    assert differences.of(numbers(front=0, server=2)).answered["5xx"] == 0
    assert differences.of(numbers(front=1, server=2)).answered["5xx"] == 1


def test_a_new_haproxy_begins_at_0() -> None:
    differences = Differences()
    differences.of(numbers(front=50, server=20))
    assert differences.of(numbers(front=3, server=1)).answered["5xx"] == 2


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


class Haproxy:
    """A socket that says `says`, or hangs up."""

    def __init__(self) -> None:
        self.says = numbers(front=0, server=0)
        self.asked = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"show stat\n"
        self.asked += 1
        writer.write(self.says.encode())
        writer.close()

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self, path):
            yield

    async def heard(self) -> None:
        """Somebody has counted what it says now."""
        after = self.asked + 2
        await until(lambda: self.asked >= after)


async def test_one_gateway_counts_and_another_goes_on(tmp_path: Path, counted: Counted) -> None:
    path, haproxy = tmp_path / "node" / "admin.sock", Haproxy()
    gateways = [asyncio.create_task(HaproxyCounts(path, counted).run()) for _ in range(2)]
    await asyncio.sleep(0.05)
    path.parent.mkdir()
    async with haproxy.listening(path):
        haproxy.says = numbers(front=3, server=1, redispatched=1)
        await haproxy.heard()
        assert (counted.failed, counted.retried) == (2, 1)
        gateways[0].cancel()
        await asyncio.wait(gateways[:1])
        haproxy.says = numbers(front=7, server=1, redispatched=1)
        await haproxy.heard()
        assert (counted.failed, counted.retried) == (6, 1)
    gateways[1].cancel()


@pytest.mark.parametrize("says", ["", "Unknown command\n", "# pxname,svname\na,b\n", "\0" * 3_000_000])
async def test_what_cannot_be_read_harms_nobody(tmp_path: Path, counted: Counted, says: str) -> None:
    path, haproxy = tmp_path / "admin.sock", Haproxy()
    counting = asyncio.create_task(HaproxyCounts(path, counted).run())
    async with haproxy.listening(path):
        haproxy.says = says
        await haproxy.heard()
        haproxy.says = numbers(front=1, server=0)
        await haproxy.heard()
        assert counted.failed == 1
    counting.cancel()
