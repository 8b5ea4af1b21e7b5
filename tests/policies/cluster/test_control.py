"""Plans over time: no flapping, the order of degradation, reasons."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.cluster.baselines import Greedy, Independent
from pliant.policies.cluster.budget import Nodes, Shape
from pliant.policies.cluster.control import Decision, Joint, Offer, Service

PERIOD_S = 30.0
MOST = 16
NODES = [Nodes(2, 8)]


def offer(name: str, demand: float, running: int, weight: float = 1.0, batch: bool = False, least: int = 0) -> Offer:
    """A service whose replicas serve one unit of demand each, all the better the more spare there is."""
    replicas = np.arange(MOST + 1)
    factors = np.linspace(0.7, 1.3, 7)[:, None]
    worth = weight * np.minimum(replicas, demand * factors).mean(axis=0)
    service = Service(name, Shape(1), least, MOST, running, 30.0, demand / max(running, 1))
    return Offer((service,), ((worth,),), batch)


def follow(policy: object, demand: Callable[[float], dict[str, float]], seconds: float) -> list[Decision]:
    running = dict.fromkeys(demand(0.0), 1)
    made = []
    for step in range(int(seconds / PERIOD_S)):
        now = step * PERIOD_S
        offers = [offer(name, each, running[name]) for name, each in demand(now).items()]
        decision = policy.decide(now, offers, NODES)  # type: ignore[attr-defined]
        assert sum(decision.replicas.values()) <= 16
        running = dict(decision.replicas)
        made.append(decision)
    return made


def moves(decisions: list[Decision], name: str) -> int:
    return sum(change.name == name for decision in decisions for change in decision.changes)


@given(st.floats(60, 1200), st.floats(1, 6), st.floats(0.02, 0.5))
@settings(max_examples=5, deadline=None)
def test_square_waves_move_no_more_often_than_allowed(period_s: float, low: float, price: float) -> None:
    decisions = follow(
        Joint(price), lambda now: {"a": low if now % period_s < period_s / 2 else low + 6, "b": 3.0}, 7200
    )
    assert moves(decisions, "a") <= 2 * 6 + 12
    assert moves(decisions, "b") <= 2 * 6 + 12


def test_noise_moves_nothing_and_ramps_only_one_way() -> None:
    rng = np.random.default_rng(0)
    decisions = follow(Joint(0.3), lambda _: {"a": 5 * rng.normal(1, 0.03), "b": 7 * rng.normal(1, 0.03)}, 7200)
    assert moves(decisions[40:], "a") + moves(decisions[40:], "b") <= 2
    counts = [each.replicas["a"] for each in follow(Joint(0.3), lambda now: {"a": 1 + 9 * now / 7200}, 7200)]
    assert (np.diff(counts) >= 0).all()
    assert counts[-1] >= 9


def test_batch_gives_way_first_and_then_what_weighs_least() -> None:
    def split(gpus: int) -> dict[str, int]:
        offers = [
            offer("batch", 4, 0, weight=5, batch=True),
            offer("light", 4, 0, weight=1),
            offer("heavy", 4, 0, weight=3),
        ]
        return dict(Joint(hold_s=1e6).decide(0.0, offers, [Nodes(1, gpus)]).replicas)

    assert split(16) == {"batch": 5, "light": 5, "heavy": 6} or sum(split(16).values()) == 16
    assert split(10)["batch"] == 0
    assert split(10)["light"] >= 4
    tight = split(4)
    assert tight["heavy"] >= 3
    assert tight["batch"] == 0


def test_a_cascade_gives_up_large_answers_before_others_shed() -> None:
    def cascade(running: int) -> Offer:
        large = Service("large", Shape(1), 0, 8, running, 30.0)
        small = Service("small", Shape(1), 1, 8, 2, 30.0)
        count = np.arange(9)
        accurate = 0.8 * np.minimum(count / 2, 1), 0.15 * np.minimum(count / 6, 1)
        cheap = 0.8 * np.minimum(count / 2, 1), 0.13 * np.minimum(count / 2, 1)
        return Offer((small, large), (accurate, cheap))

    roomy = Joint(hold_s=1e6).decide(0.0, [cascade(2), offer("chat", 4, 4)], [Nodes(1, 16)])
    tight = Joint(hold_s=1e6).decide(0.0, [cascade(2), offer("chat", 4, 4)], [Nodes(1, 8)])
    assert roomy.choices[0] == 0
    assert tight.choices[0] == 1
    assert tight.replicas["chat"] >= 4
    assert tight.replicas["small"] == 2


def test_reasons_say_who_gave_what() -> None:
    decision = Joint(hold_s=3600).decide(0.0, [offer("chat", 9, 5), offer("digits", 4, 11)], NODES)
    by_service = {change.name: change for change in decision.changes}
    assert by_service["chat"].after > 5
    assert "from digits, which loses" in by_service["chat"].reason
    assert str(by_service["chat"]).startswith(f"chat 5 → {by_service['chat'].after}: ")
    assert "chat can use the room better" in by_service["digits"].reason
    assert decision.prices["chat"] >= 0


def test_an_unused_service_sleeps_when_gpus_have_a_price() -> None:
    decision = Joint(0.01).decide(0.0, [offer("idle", 0.0, 2), offer("chat", 2, 2)], NODES)
    assert decision.replicas["idle"] in (0, 2)
    later = Joint(0.01, hold_s=3600).decide(0.0, [offer("idle", 0.0, 2)], NODES)
    assert later.replicas["idle"] == 0
    assert later.changes[0].reason == "nothing is asked of it"


def test_what_runs_on_a_node_that_is_gone_is_planned_anew() -> None:
    policy = Joint()
    policy.decide(0.0, [offer("chat", 14, 1)], NODES)
    assert policy.decide(1.0, [offer("chat", 14, 16)], [Nodes(1, 8)]).replicas == {"chat": 8}


def test_baselines_keep_to_the_budget() -> None:
    for policy in (Independent(0.7), Greedy(0.1)):
        decisions = follow(policy, lambda now: {"a": 12 + 4 * math.sin(now / 600), "b": 9.0}, 3600)
        assert all(each.replicas["a"] + each.replicas["b"] <= 16 for each in decisions)
    steady = follow(Independent(0.5), lambda _: {"a": 3.0}, 600)
    assert steady[-1].replicas == {"a": 6}
