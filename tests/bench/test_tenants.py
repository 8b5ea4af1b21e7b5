"""One tenant asks for ten times its share: the other has nearly all it had alone. In time that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import virtual_loop

from pliant.bench.tenants import llm, vision
from pliant.bench.tenants.load import FOR_EVER_S, GREEDY_LOAD, Found, Mode, requests

SECONDS = 30.0


def of_llm(mode: Mode) -> Found:
    return llm.serve(mode, SECONDS, seed=0)


def of_vision(mode: Mode) -> Found:
    return virtual_loop.run(vision.serve(mode, SECONDS, seed=0))


@pytest.mark.parametrize("serve", [of_llm, of_vision])
def test_a_tenant_within_its_share_is_served_whatever_another_asks_for(serve: Callable[[Mode], Found]) -> None:
    alone, shared, as_one = serve("alone"), serve("shared"), serve("as_one")
    assert alone.asked == shared.asked == as_one.asked > 100
    assert shared.goodput >= 0.9 * alone.goodput
    assert as_one.goodput < 0.5 * alone.goodput, "without shares the other one takes it all"
    assert shared.greedy > 0.4 * as_one.greedy, "which gets what is left"


def test_the_greedy_one_asks_for_ten_times_its_share() -> None:
    asked = requests("shared", 0.01, 0.05, capacity=2.0, seconds=100.0, seed=0)
    work_s = sum(0.05 for each in asked if not each.modest)
    assert work_s == pytest.approx(10 * 0.5 * 2.0 * 100, rel=0.1)
    assert GREEDY_LOAD == 5.0
    assert FOR_EVER_S == 3600
    assert {each.tenant.name for each in requests("as_one", 0.01, 0.05, 2.0, 10.0, 0)} == {"all"}
    assert {each.tenant.name for each in requests("alone", 0.01, 0.05, 2.0, 10.0, 0)} == {"modest"}
