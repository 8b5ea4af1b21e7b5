"""How many gateways there are to be: by their own load, calmly, whoever starts, ends, or is replaced meanwhile."""

from __future__ import annotations

import pytest

from pliant.config.base import ReplicaRange
from pliant.deployments.serving.busyness import Busyness
from pliant.deployments.serving.gateways import BUSY, Gateways
from pliant.deployments.serving.messages import News


class House:
    """Gateways that share what comes, say once a second how busy that keeps them, and start and end late."""

    def __init__(self, least: int = 1, most: int = 6, there: int = 1, start_s: int = 8) -> None:
        self.now = 0
        self.names = [f"g{index}" for index in range(there)]
        self._start_s = start_s
        self._made = there
        self._starting: list[int] = []
        self._sizes = ReplicaRange(min=least, max=most)
        self.counts: list[int] = []
        self.restart()

    def restart(self) -> None:
        """The planner is another one."""
        self.gateways = Gateways(self._sizes, lambda: float(self.now))

    def run(self, seconds: int, load: float) -> None:
        for _ in range(seconds):
            self.now += 1
            for name in self.names:
                self.gateways.hear(name, {"one": News(gateway_busy=min(1.0, load / len(self.names))), "two": News()})
            self._serve_follows()
            self.counts.append(self.gateways.count)

    def _serve_follows(self) -> None:
        wanted = self.gateways.wanted().get("gateway", len(self.names) + len(self._starting))
        self._starting += [self.now + self._start_s] * (wanted - len(self.names) - len(self._starting))
        for ready in [each for each in self._starting if each <= self.now]:
            self._starting.remove(ready)
            self.names.append(f"g{self._made}")
            self._made += 1
        del self.names[max(wanted, 1) :]


def test_more_come_with_the_load_and_go_when_it_has_been_low_for_five_minutes() -> None:
    house = House()
    house.run(120, 0.3)
    assert set(house.counts) == {1}
    house.run(60, 2.0)
    busy = len(house.names)
    assert busy in (4, 5), "of which each is busy for less than it should"
    assert house.gateways.facts()["wanted_because"].endswith("of its time, and 60% is aimed at")
    house.run(200, 0.3)
    assert len(house.names) == busy
    house.run(150, 0.3)
    assert len(house.names) == 1


def test_waves_and_noise_do_not_make_it_flap() -> None:
    house = House()
    house.run(70, 1.0)
    for _ in range(20):
        house.run(60, 2.4)
        house.run(60, 1.0)
    assert set(house.counts[600:]) == {4}


def test_no_more_than_max_and_no_fewer_than_min() -> None:
    house = House(least=2, most=3, there=2)
    house.run(400, 50.0)
    assert house.gateways.wanted() == {"gateway": 3}
    house.run(800, 0.0)
    assert house.gateways.wanted() == {"gateway": 2}


def test_a_fixed_number_is_never_said_to_serve() -> None:
    house = House(least=2, most=2, there=2)
    house.run(300, 50.0)
    assert house.gateways.wanted() == {}
    assert house.gateways.count == 2


def test_a_planner_that_starts_anew_takes_over_what_runs() -> None:
    house = House()
    house.run(180, 2.0)
    busy = len(house.names)
    assert busy > 1
    house.restart()
    house.run(30, 2.0)
    assert house.gateways.wanted() == {}
    house.run(300, 2.0)
    assert set(house.counts[-330:]) <= {busy, busy - 1}, "no fewer than are needed, and those go after five minutes"


def test_those_that_end_what_they_have_do_not_count_as_idle() -> None:
    """One that Serve has taken out of HAProxy still asks the planner, for as long as its streams last."""
    house = House(there=3)
    house.run(70, 3 * BUSY)
    for _ in range(600):
        house.now += 1
        for name, busy in (("g0", 0.9), ("g1", 0.9), ("leaving", 0.0)):
            house.gateways.hear(name, {"one": News(gateway_busy=busy)})
    assert house.gateways.count == 3


def test_a_gateway_is_as_busy_as_its_processor_or_its_places() -> None:
    now, computed = [0.0], [0.0]
    busyness = Busyness(lambda: now[0], lambda: computed[0])
    now[0], computed[0] = 2.0, 0.5
    assert busyness.take() == pytest.approx(0.25)
    busyness.occupy(0.75)
    now[0], computed[0] = 4.0, 1.0
    assert busyness.take() == pytest.approx(0.75)
    busyness.occupy(0.0)
    assert busyness.take() == 0.0
    now[0] = 5.0
    assert busyness.take() == 0.0
