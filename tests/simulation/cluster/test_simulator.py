"""The cluster's simulator on loads whose outcome is known."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.policies.cluster.baselines import Greedy, Independent
from pliant.policies.cluster.budget import Nodes, Shape
from pliant.policies.cluster.control import Joint
from pliant.simulation.cluster.simulator import Cascaded, Outcome, Served, Simulation

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
