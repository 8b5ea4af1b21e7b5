"""One tenant asks for ten times its share: the other has nearly all it had alone. In time that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support import virtual_loop

from pliant.bench.tenants import llm, vision
from pliant.bench.tenants.load import FOR_EVER_S, GREEDY_LOAD, MODES, Asked, Found, Work, requests, steady

SECONDS = 30.0
WORK = Work(modest_s=0.01, greedy_s=0.05, capacity=2.0)


def of_vision(work: Sequence[Asked]) -> Found:
    return virtual_loop.run(vision.served(work))


KINDS = pytest.mark.parametrize(
    ("serve", "system", "slo_s"), [(llm.serve, llm.WORK, llm.SLO_S), (of_vision, vision.WORK, vision.SLO_S)]
)
Serve = Callable[[Sequence[Asked]], Found]


@KINDS
def test_a_tenant_within_its_share_is_served_whatever_another_asks_for(
    serve: Serve, system: Work, slo_s: float
) -> None:
    alone, shared, as_one = (serve(requests(mode, system, SECONDS, seed=0)) for mode in MODES)
    assert alone.asked == shared.asked == as_one.asked > 100
    assert shared.goodput >= 0.9 * alone.goodput
    assert as_one.goodput < 0.5 * alone.goodput, "without shares the other one takes it all"
    assert shared.greedy > 0.4 * as_one.greedy, "which gets what is left"


@KINDS
def test_at_twice_the_capacity_as_much_is_answered_in_time(serve: Serve, system: Work, slo_s: float) -> None:
    full, over = (serve(steady(load, system, SECONDS, seed=0)) for load in (1.0, 2.0))
    assert over.asked > 1.8 * full.asked
    assert over.in_time >= 0.95 * full.in_time
    assert over.p98_ms() <= 1e3 * slo_s


def test_the_greedy_one_asks_for_ten_times_its_share() -> None:
    asked = requests("shared", WORK, seconds=100.0, seed=0)
    work_s = sum(0.05 for each in asked if not each.modest)
    assert work_s == pytest.approx(10 * 0.5 * 2.0 * 100, rel=0.1)
    assert GREEDY_LOAD == 5.0
    assert FOR_EVER_S == 3600
    assert {each.tenant.name for each in requests("as_one", WORK, 10.0, 0)} == {"all"}
    assert {each.tenant.name for each in requests("alone", WORK, 10.0, 0)} == {"modest"}
