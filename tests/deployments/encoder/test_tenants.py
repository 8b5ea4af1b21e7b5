"""Tenants in an encoder's replica, and on their way to it: each gets its share, whatever the others ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.doubles import Sleeper, Sleepers, report
from support.waiting import HANGS_AFTER_S, until

from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.errand import TextWant
from pliant.deployments.encoder.messages import Answer, Query
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.table import NoTimeError, ReplicaTable
from pliant.deployments.serving.tenants import Tenant

GREEDY, MODEST = Tenant("greedy"), Tenant("modest")
BLOCKS = 99
"""The first token of a text that is computed until the test goes on."""


class Gated(Sleepers):
    """Their sleepers do not sleep."""

    def __init__(self) -> None:
        super().__init__(service_s=0.001)
        self.go_on = threading.Event()
        self.blocked = threading.Event()
        self.seen: list[int] = []

    def load(self, max_length: int) -> Runtime:
        gated = self

        class Gate(Sleeper):
            def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
                if int(ids[0]) == BLOCKS:
                    gated.blocked.set()
                    gated.go_on.wait(HANGS_AFTER_S)
                else:
                    gated.seen.append(int(ids[0]))
                return super().__call__(ids)

        return Gate(max_length, service_s=0.001)


def query(first: int, tenant: Tenant, budget_s: float | None = None) -> Query:
    return Query(np.array([first] * 4, dtype="<i4").tobytes(), 4, budget_s, 1.0, tenant=tenant)


class House:
    """An engine that computes nothing until `go_on`, and what it was asked."""

    def __init__(self, limit: int) -> None:
        self.gated = Gated()
        self.engine = Engine(self.gated, limit=limit)
        self.asked: list[asyncio.Task[Answer | Refusal]] = []

    async def begin(self) -> None:
        await self.engine.hold(8)
        await self.ask(query(BLOCKS, Tenant("first")))
        await until(self.gated.blocked.is_set)
        self.gated.seen.clear()

    async def ask(self, *queries: Query) -> list[asyncio.Task[Answer | Refusal]]:
        tasks = [asyncio.create_task(self.engine.infer(each)) for each in queries]
        self.asked += tasks
        await asyncio.sleep(0)
        return tasks

    async def answers(self) -> list[int]:
        """The first tokens of what is computed, in order."""
        self.gated.go_on.set()
        await asyncio.gather(*self.asked, return_exceptions=True)
        return self.gated.seen


@pytest.fixture
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    house = House(getattr(request, "param", 1024))
    await house.begin()
    yield house
    await house.answers()


async def test_one_tenant_does_not_hold_up_another(house: House) -> None:
    await house.ask(*(query(1, GREEDY) for _ in range(40)))
    await house.ask(*(query(2, MODEST) for _ in range(3)))
    assert {*house.engine.report()["tenants"]} == {"greedy", "modest"}
    order = await house.answers()
    assert order.count(1) == 40
    assert max(index for index, first in enumerate(order) if first == 2) <= 6


async def test_weights_share_the_computing(house: House) -> None:
    await house.ask(*(query(1, Tenant("light", 1.0)) for _ in range(15)))
    await house.ask(*(query(2, Tenant("heavy", 100.0)) for _ in range(15)))
    order = await house.answers()
    assert order[:16].count(2) == 15


async def test_who_is_within_its_share_is_let_in_though_the_queue_is_long(house: House) -> None:
    service_s = house.engine.report()["service_s"]
    await house.ask(*(query(1, GREEDY) for _ in range(40)))
    [late] = await house.ask(query(1, GREEDY, 10 * service_s))
    await house.ask(query(2, MODEST, 10 * service_s))
    refusal = late.result()
    assert isinstance(refusal, Refusal)
    assert refusal.cause == "busy"
    assert 2 in await house.answers()


@pytest.mark.parametrize("house", [8], indirect=True)
async def test_a_full_queue_refuses_who_is_furthest_over_its_share(house: House) -> None:
    greedy = await house.ask(*(query(first, GREEDY) for first in range(1, 11)))
    modest = await house.ask(*(query(50, MODEST) for _ in range(2)))
    order = await house.answers()
    assert sorted(order) == [1, 2, 3, 4, 5, 6, 50, 50], "those that came last made way"
    assert all(isinstance(each.result(), Answer) for each in modest)
    for each in greedy[6:]:
        refusal = each.result()
        assert isinstance(refusal, Refusal)
        assert (refusal.cause, refusal.outcome) == ("busy", Outcome.SHED)
        assert "more than its share" in refusal.reason


async def test_a_client_that_left_is_neither_computed_nor_charged(house: House) -> None:
    left = await house.ask(*(query(7, MODEST) for _ in range(5)))
    for each in left:
        each.cancel()
    await asyncio.wait(left)
    assert house.engine.report()["tenants"] == {}
    await house.ask(query(1, GREEDY), query(2, MODEST))
    assert sorted(await house.answers()) == [1, 2]


def busy(tenants: dict[str, float]) -> Any:
    return {**report(64), "held": {"another gateway": 5.0}, "tenants": tenants}


def test_a_gateway_leaves_it_to_replicas_whose_turn_it_is() -> None:
    table: ReplicaTable[TextWant, Any] = ReplicaTable(EncoderChooser(slo_s=1.0))
    table.sync({"a": busy({"greedy": 5.0})})
    with pytest.raises(NoTimeError):
        table.choose(TextWant(8, 1.0, 1.0, tenant="greedy"))
    assert table.choose(TextWant(8, 1.0, 1.0, tenant="modest")).replica == "a"
    with pytest.raises(NoTimeError):  # nobody would be in time
        table.choose(TextWant(8, 0.001, 1.0, tenant="modest"))


def test_a_gateway_counts_whose_texts_it_has_sent() -> None:
    table: ReplicaTable[TextWant, Any] = ReplicaTable(EncoderChooser(slo_s=1.0))
    table.sync({"a": busy({})})
    with pytest.raises(NoTimeError):
        table.choose(TextWant(8, 1.0, 1.0, tenant="modest"))
    sent = table.choose(TextWant(8, None, 1.0, tenant="greedy"))
    table.done(table.choose(TextWant(8, 1.0, 1.0, tenant="modest")))
    table.done(sent)
    with pytest.raises(NoTimeError):
        table.choose(TextWant(8, 1.0, 1.0, tenant="modest"))
