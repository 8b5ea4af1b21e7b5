"""The gateway's side of planning, against a planner that answers, changes its mind, or is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from support.scripted_replicas import CountingChooser

from pliant.deployments.serving import follower
from pliant.deployments.serving.errors import ReplicaLostError
from pliant.deployments.serving.follower import Follower, Tally
from pliant.deployments.serving.least_held import LeastHeld, Share
from pliant.deployments.serving.messages import Guidance, News
from pliant.deployments.serving.parcels import Report
from pliant.deployments.serving.table import ReplicaTable

pytestmark = pytest.mark.virtual_time


Table = ReplicaTable[Share, Report]


def report(version: int = 1, held: float = 0.0, served: int = 0) -> Report:
    return Report(version=version, held={"another gateway": held}, served=served)


def chosen(table: Table) -> str:
    choice = table.choose(Share())
    table.done(choice)
    return choice.replica


class Planner:
    """Answers with `guidance` whenever `turn` is set; raises it if it is an error."""

    def __init__(self) -> None:
        self.told: list[tuple[str, News]] = []
        self.guidance: Guidance | Exception = Guidance()
        self.turn = asyncio.Event()
        self.answered = asyncio.Event()

    async def exchange(self, me: str, seen: str, news: Mapping[str, News]) -> tuple[str, Mapping[str, Guidance]]:
        await self.turn.wait()
        self.turn.clear()
        self.told.append((seen, news["topics"]))
        self.answered.set()
        if isinstance(self.guidance, Exception):
            raise self.guidance
        return f"state-{len(self.told)}", {"topics": self.guidance}

    async def answer(self, guidance: Guidance | Exception) -> None:
        self.guidance = guidance
        self.answered.clear()
        self.turn.set()
        await self.answered.wait()
        await asyncio.sleep(0.01)


@pytest.fixture
def table() -> Table:
    """Of two replicas, of which the idle one is chosen."""
    table: Table = ReplicaTable(LeastHeld())
    table.sync({"idle": report(), "busy": report(held=5)})
    return table


async def test_news_go_out_once_and_guidance_is_followed(table: Table) -> None:
    planner, tally = Planner(), Tally(clock=lambda: 1e9 + 0.5)
    task = asyncio.create_task(Follower("me", planner.exchange, {"topics": table}, {"topics": tally}).run())
    await planner.answer(Guidance())
    tally.arrived(10)
    tally.answered(0.96)
    tally.answered(0.6)
    tally.answered(0.1)
    tally.shed()
    await planner.answer(Guidance(moving=frozenset({"idle"})))
    assert chosen(table) == "busy"
    await planner.answer(Guidance())
    assert chosen(table) == "idle"
    await planner.answer(Guidance(reports={"idle": report(version=3, held=9)}))
    assert chosen(table) == "busy", "it is idle no more"
    told = News(arrived=Counter({10: 1}), seconds=Counter({10**9: 1}), answered=3, near_slo=1, above_half=2, shed=1)
    assert planner.told == [("", News()), ("state-1", News()), ("state-2", told), ("state-3", News())]
    task.cancel()


async def test_the_planner_hears_how_requests_ended_in_all(table: Table) -> None:
    requests: Counter[str] = Counter(ok=1)
    planner = Planner()
    follower = Follower("me", planner.exchange, {"topics": table}, {"topics": Tally(requests)})
    task = asyncio.create_task(follower.run())
    await planner.answer(Guidance())
    requests["ok"] += 1
    await planner.answer(Guidance(requests={"another": {"shed": 2}}))
    await planner.answer(Guidance())
    assert [news.requests for _, news in planner.told] == [{"ok": 1}, {"ok": 1}, {"ok": 2}]
    task.cancel()


async def test_while_the_planner_is_gone_all_replicas_are_used_and_old_news_are_dropped(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_RETRY_S", 0.0)
    planner, tally = Planner(), Tally()
    followed = Follower("me", planner.exchange, {"topics": table}, {"topics": tally})
    task = asyncio.create_task(followed.run())
    await planner.answer(Guidance(moving=frozenset({"idle"}), plan={"version": 1}))
    tally.arrived(10)
    for _ in range(3):
        await planner.answer(ConnectionError("gone"))
    assert chosen(table) == "idle"
    assert followed.of("topics").plan == {}
    await planner.answer(Guidance())
    tally.arrived(20)
    await planner.answer(Guidance())
    await planner.answer(Guidance())
    assert [dict(news.arrived) for _, news in planner.told] == [{}, {}, {}, {}, {}, {}, {20: 1}]
    task.cancel()


async def test_guidance_does_not_undo_what_is_known_better(table: Table) -> None:
    planner = Planner()
    task = asyncio.create_task(Follower("me", planner.exchange, {"topics": table}, {"topics": Tally()}).run())
    moved = report(version=3)
    await planner.answer(Guidance(reports={"idle": moved, "left": moved}))
    table.observe("idle", report(version=3, served=7))
    await planner.answer(Guidance(reports={"idle": moved}))
    assert table.reports()["idle"]["served"] == 7
    assert "left" not in table.reports()
    task.cancel()


async def test_who_else_sends_to_the_replicas_is_passed_on_and_not_forgotten() -> None:
    planner, chooser = Planner(), CountingChooser()
    table: ReplicaTable[Any, Report] = ReplicaTable(chooser)
    task = asyncio.create_task(Follower("me", planner.exchange, {"topics": table}, {"topics": Tally()}).run())
    await planner.answer(Guidance(gateways=frozenset({"me", "other"})))
    assert chooser.shared == ("me", {"me", "other"})
    await planner.answer(Guidance())
    assert chooser.shared == ("me", {"me", "other"})
    task.cancel()


@pytest.mark.virtual_time
async def test_a_planner_that_another_has_taken_over_from_is_not_obeyed(table: Table) -> None:
    said = {
        "old": Guidance(plan={"version": 9}, epoch=1),
        "new": Guidance(plan={"version": 1}, epoch=2),
        "of a version without epochs": Guidance(plan={"version": 3}),
    }
    answers, obeyed = ["old", "new", "old", "new", "of a version without epochs"], []

    async def exchange(_me: str, _seen: str, _news: Mapping[str, News]) -> tuple[str, Mapping[str, Guidance]]:
        obeyed.append(follower.of("topics").plan.get("version"))
        if not answers:
            await asyncio.Event().wait()
        return "seen", {"topics": said[answers.pop(0)]}

    follower = Follower("me", exchange, {"topics": table}, {"topics": Tally()})
    task = asyncio.create_task(follower.run())
    await asyncio.sleep(3)
    assert obeyed == [None, 9, 1, 1, 1, 3]
    task.cancel()


async def test_calls_of_a_planner_end_when_a_newer_one_answers(table: Table) -> None:
    planner = Planner()
    follower = Follower("me", planner.exchange, {"topics": table}, {"topics": Tally()})
    task = asyncio.create_task(follower.run())
    stopped = asyncio.Event()
    first = asyncio.create_task(follower.while_it_lasts(stopped.wait()))
    await planner.answer(Guidance(epoch=1))
    await planner.answer(Guidance(epoch=1))
    assert not first.done(), "the first planner that answers replaces none"
    await planner.answer(Guidance(epoch=2))
    with pytest.raises(ReplicaLostError):
        await first
    second = asyncio.create_task(follower.while_it_lasts(asyncio.sleep(60, "answer")))
    await planner.answer(Guidance(epoch=1))
    assert await second == "answer"
    task.cancel()
