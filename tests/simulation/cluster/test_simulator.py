"""The cluster's simulator on loads whose outcome is known."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.policies.cluster.baselines import Greedy, Independent
from pliant.policies.cluster.budget import Nodes, Shape
from pliant.policies.cluster.control import Joint
from pliant.simulation.cluster.simulator import Cascaded, Outage, Outcome, Served, Simulation

SECONDS = 3600


def served(name: str, rates: np.ndarray, least: int = 1) -> Served:
    """A replica does ten requests per second."""

    def curve(rate: float, spread: float) -> np.ndarray:
        factors = np.linspace(1 - 2 * min(spread, 0.4) - 0.1, 1.1 + 2 * min(spread, 0.4), 9)[:, None]
        return np.minimum(10.0 * np.arange(17), rate * factors).mean(axis=0)

    history = np.full(60, rates[0])
    return Served(name, Shape(1), least, 16, 60.0, 10.0, 0.5, rates, history, 1.0, curve)


def shift() -> list[Served]:
    """Load that moves from one service to the other."""
    ramp = np.clip((np.arange(SECONDS) - 900) / 1800, 0, 1)
    return [served("a", 80 - 70 * ramp), served("b", 10 + 70 * ramp)]


def test_enough_replicas_answer_all_and_half_of_them_half() -> None:
    services = [served("a", np.full(SECONDS, 80.0), least=0)]
    idle = Simulation(services, [], [Nodes(2, 8)]).run(Joint(moves_per_hour=1e-9), {"a": 12})
    assert idle.attainment > 0.99
    tight = Simulation(services, [], [Nodes(1, 4)]).run(Joint(), {"a": 4})
    assert tight.attainment == pytest.approx(0.5, abs=0.02)
    assert tight.gpu_hours == pytest.approx(4, rel=0.01)


def test_replicas_follow_the_load_and_beat_those_that_stay() -> None:
    simulation = Simulation(shift(), [], [Nodes(1, 12)])
    start = {"a": 10, "b": 2}
    joint = simulation.run(Joint(), start)
    stays = simulation.run(Joint(moves_per_hour=1e-9, hold_s=1e-3), start)
    assert joint.attainment > 0.95
    assert joint.attainment > stays.attainment + 0.1
    assert joint.moves_per_hour <= 18
    assert any("took" in reason for _, reason in joint.reasons)


def test_a_surge_is_not_waited_out() -> None:
    """Within a period, as soon as two seconds have more than chance."""
    surges_at = 1003
    rates = np.where(np.arange(SECONDS) < surges_at, 20.0, 80.0)
    outcome = Simulation([served("a", rates)], [], [Nodes(1, 16)]).run(Joint(), {"a": 4})
    first = min(now for now, _ in outcome.reasons if now > surges_at)
    assert first <= surges_at + 3
    assert outcome.moves["a"] < 8


def test_the_same_run_gives_the_same_outcome() -> None:
    def once() -> Outcome:
        return Simulation(shift(), [], [Nodes(1, 12)], seed=3).run(Greedy(), {"a": 10, "b": 2})

    assert once() == once()


def test_an_independent_autoscaler_waits_for_room() -> None:
    outcome = Simulation(shift(), [], [Nodes(1, 12)]).run(Independent(0.5, down_s=600), {"a": 11, "b": 1})
    assert outcome.earned["b"] / outcome.possible["b"] < 0.9


def test_a_cascade_chooses_cheaper_cut_offs_when_there_is_no_room() -> None:
    services = [served("small", np.full(SECONDS, 1.0)), served("large", np.full(SECONDS, 1.0))]
    cascade = Cascaded(
        "both", "small", "large", 0.8, ((0.5, 0.95), (0.1, 0.9)), np.full(SECONDS, 40.0), np.ones(9), 1.0
    )
    roomy = Simulation(services, [cascade], [Nodes(2, 8)]).run(Joint(), {"small": 6, "large": 3})
    tight = Simulation(services, [cascade], [Nodes(1, 6)]).run(Joint(), {"small": 5, "large": 1})
    assert roomy.attainment > 0.97
    assert tight.earned["both"] / tight.possible["both"] > 0.9


@pytest.mark.parametrize("gpus", [2, 4, 8, 16])
def test_what_is_answered_and_shed_is_what_was_asked_and_more_gpus_serve_no_less(gpus: int) -> None:
    def run(gpus: int) -> Outcome:
        simulation = Simulation(shift(), [], [Nodes(1, gpus)], known=True, recorded=True)
        return simulation.run(Joint(moves_per_hour=1e9), {"a": 1, "b": 1})

    outcome = run(gpus)
    assert outcome.asked == {each.name: pytest.approx(each.rates.sum()) for each in shift()}
    for name, asked in outcome.asked.items():
        assert 0 <= outcome.answered[name] <= asked
        assert outcome.earned[name] == pytest.approx(outcome.answered[name])
    assert run(gpus + 1).attainment >= outcome.attainment - 1e-6


def with_outages(*outages: Outage, gpus: int = 8) -> Outcome:
    """70 requests per second, for which eight replicas are enough, on four nodes."""
    services = [served("a", np.full(SECONDS, 70.0))]
    return Simulation(services, [], [Nodes(4, gpus // 2)], outages=outages).run(Joint(), {"a": 8})


HALF = Nodes(2, 4)


def test_nodes_that_go_without_notice_take_their_replicas_with_them() -> None:
    whole, lost = with_outages(), with_outages(Outage(HALF, 1200, 600))
    assert whole.attainment > 0.99
    missed = whole.answered["a"] - lost.answered["a"]
    assert 0.1 * 60 * 70 < missed < 200 * 70, "for as long as a period and a start take"
    assert (1200, "2 nodes go at 1200 s") in lost.reasons


def test_within_a_notice_replicas_start_elsewhere_and_nothing_is_missed() -> None:
    assert with_outages(Outage(HALF, 1200, 600, notice_s=180)).attainment > 0.99


def test_what_has_no_room_is_missed_until_the_nodes_are_back() -> None:
    outcome, none = with_outages(Outage(Nodes(2, 2), 1200, 600, notice_s=180), gpus=4), with_outages(gpus=4)
    assert 0.3 * 600 * 70 < none.answered["a"] - outcome.answered["a"] < 0.7 * 1000 * 70


def test_without_any_node_nothing_is_answered_and_all_is_well_again_later() -> None:
    outcome = with_outages(Outage(Nodes(4, 4), 1200, 600))
    assert 600 * 70 * 0.95 < outcome.asked["a"] - outcome.answered["a"] < 800 * 70


def test_an_outage_after_the_end_changes_nothing() -> None:
    assert with_outages(Outage(HALF, SECONDS + 500, 600, notice_s=60)) == with_outages()
