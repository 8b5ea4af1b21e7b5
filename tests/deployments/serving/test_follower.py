"""The gateway's side of planning, against a planner that answers, changes its mind, or is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest
from pliant.deployments.encoder.routing_table import RoutingTable
from support.doubles import report

from pliant.deployments.serving import follower
from pliant.deployments.serving.follower import Follower, Tally
from pliant.deployments.serving.messages import Guidance, News

pytestmark = pytest.mark.virtual_time


class Planner:
    """Answers with `guidance` whenever `turn` is set; raises it if it is an error."""

    def __init__(self) -> None:
        self.told: list[tuple[str, News]] = []
        self.guidance: Guidance | Exception = Guidance()
        self.turn = asyncio.Event()
        self.answered = asyncio.Event()

    async def exchange(self, seen: str, news: Mapping[str, News]) -> tuple[str, Mapping[str, Guidance]]:
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
def table() -> RoutingTable:
    table = RoutingTable(1.0)
    table.sync({"short": report(64), "long": report(512)})
    return table


async def test_news_go_out_once_and_guidance_is_followed(table: RoutingTable) -> None:
    planner, tally = Planner(), Tally()
    task = asyncio.create_task(Follower(planner.exchange, {"topics": table}, {"topics": tally}).run())
    await planner.answer(Guidance())
    tally.arrived(10)
    tally.answered(0.96)
    tally.answered(0.6)
    tally.answered(0.1)
    tally.shed()
    await planner.answer(Guidance(moving=frozenset({"short"})))
    assert table.choose(10, None, 1.0) == "long"
    await planner.answer(Guidance(reports={"short": report(128, version=3)}))
    assert table.choose(100, None, 1.0) == "short"
    told = News(arrived=Counter({10: 1}), answered=3, near_slo=1, above_half=2, shed=1)
    assert planner.told == [("", News()), ("state-1", News()), ("state-2", told)]
    task.cancel()


async def test_while_the_planner_is_gone_all_replicas_are_used_and_old_news_are_dropped(
    table: RoutingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_RETRY_S", 0.0)
    planner, tally = Planner(), Tally()
    followed = Follower(planner.exchange, {"topics": table}, {"topics": tally})
    task = asyncio.create_task(followed.run())
    await planner.answer(Guidance(moving=frozenset({"short"}), plan={"version": 1}))
    tally.arrived(10)
    for _ in range(3):
        await planner.answer(ConnectionError("gone"))
    assert table.choose(10, None, 1.0) == "short"
    assert followed.of("topics").plan == {}
    await planner.answer(Guidance())
    tally.arrived(20)
    await planner.answer(Guidance())
    await planner.answer(Guidance())
    assert [dict(news.arrived) for _, news in planner.told] == [{}, {}, {}, {}, {}, {}, {20: 1}]
    task.cancel()


async def test_guidance_does_not_undo_what_is_known_better(table: RoutingTable) -> None:
    planner = Planner()
    task = asyncio.create_task(Follower(planner.exchange, {"topics": table}, {"topics": Tally()}).run())
    moved = report(128, version=3)
    await planner.answer(Guidance(reports={"short": moved, "left": moved}))
    table.observe("short", {**moved, "served": 7})
    await planner.answer(Guidance(reports={"short": moved}))
    assert table.reports()["short"]["served"] == 7
    assert "left" not in table.reports()
    task.cancel()
