"""Profiles of devices, and the bounds of what can be earned on them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pliant.bench.report import Options
from pliant.bench.vision import compare, optimum, profiles
from pliant.bench.vision.runs import BLOCKS, Compared, Run, simulate
from pliant.bench.vision.systems import OURS, PETS, PETS_NEVER_EVICTING, Choice, infaas, slackfits
from pliant.bench.vision.workload import Trace
from pliant.errors import DataError
from pliant.simulation.vision.outcome import Outcome, Query

PAPER = profiles.paper()


def test_the_papers_profile_is_what_its_text_says() -> None:
    assert PAPER.per_s(0) == pytest.approx(580, rel=0.001)
    assert 1 / PAPER.latency(-15, 1) == pytest.approx(100, rel=0.01)
    assert 20 / PAPER.latency(-15, 20) > 0.95 * PAPER.per_s(-15)
    assert PAPER.roles[1] == "CIFAR100"
    assert all(table[8] > table[2] > table[0] > table[-15] > table[-20] for table in PAPER.accuracies.values())


def test_a_measured_profile_survives_its_file(tmp_path: Path) -> None:
    accuracies = {"a": {0: 0.9, -4: 0.8}, "b": {0: 0.5, 2: 0.6}, "c": {0: 0.7}}
    profile = profiles.measured("here", [2, 0, -4], [1, 3, 10], [[3, 5, 12], [2, 4, 11], [1, 3, 10]], accuracies)
    assert profile.gammas == (-4, 0, 2)
    assert profile.roles == ("a", "b", "c")
    assert [profile.latency(0, rows) for rows in (1, 2, 10, 12)] == [2, 3, 11, 13]
    assert profile.accuracy("b", -4) is None
    profiles.write(profile, tmp_path / "profile.json")
    assert profiles.read(tmp_path / "profile.json") == profile
    with pytest.raises(ValueError, match="three tasks"):
        profiles.measured("here", [0], [1], [[1.0]], {"a": {0: 0.5}})


def test_larger_models_are_slower_and_more_accurate() -> None:
    models = PAPER.models()
    assert models.per_s(1) == pytest.approx(PAPER.per_s(0))
    assert models.per_s(0) > models.per_s(1) > models.per_s(2)
    assert models.accuracies["EuroSAT"][0] < PAPER.accuracies["EuroSAT"][0] < models.accuracies["EuroSAT"][2]


def test_the_optimum_knows_what_comes() -> None:
    """A cheap query comes, and soon a dear one: they run together; or one by one, with less each."""
    slow = replace(PAPER, seconds=tuple(tuple(0.5 + gamma / 100 for _ in range(64)) for gamma in PAPER.gammas))
    asked = [Query(0, 0.0, 0.65, 0.1, "CIFAR10", 0.0), Query(1, 0.1, 0.67, 1.0, "CIFAR100", 0.0)]
    found, bound = optimum.exactly(slow, asked, 4, 10.0)
    both = 0.1 * 0.965 + 0.85
    assert found == pytest.approx(bound) == pytest.approx(both, abs=1e-4)
    alone, _ = optimum.exactly(slow, asked, 1, 10.0)
    assert alone == pytest.approx(0.1 * 0.86 + 0.79, abs=1e-4)
    assert found <= optimum.at_most(replace(slow, seconds=PAPER.seconds), asked)


def test_nobody_exceeds_the_bound_and_ours_comes_close() -> None:
    asked = Trace((1.3, 0.5), seed=3).queries(PAPER.per_s(), PAPER.roles)
    bound = optimum.at_most(PAPER, asked)
    assert 0.95 * bound < OURS.simulation(PAPER).run(asked).expected < bound * (1 + 1e-9)


def test_who_earns_nothing_for_a_while_is_still_compared() -> None:
    trace = Trace((4.0,) * 5, seed=0)
    systems = (OURS, PETS_NEVER_EVICTING)
    outcomes = {system.name: simulate(Run(PAPER, system, trace)) for system in systems}
    (models,) = infaas([Choice(0.65, 0.5, 0.0)])
    compared = Compared("overload", trace, outcomes, models, slackfits()[0], PETS, bound=1.0)
    assert not outcomes[PETS_NEVER_EVICTING.name].blocks(BLOCKS)[-1]
    assert compared.over(PETS_NEVER_EVICTING.name) > 2
    nothing = {PETS.name: Outcome(trace.queries(PAPER.per_s(), PAPER.roles))}
    assert replace(compared, outcomes=outcomes | nothing).over(PETS.name) == math.inf


def test_a_part_that_there_is_not_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--cells: got papers; parts are paper, digits, real"):
        compare.run(Options(True, None, "cpu", tmp_path, ["paper", "papers"]))


@pytest.mark.parametrize(("part", "needed"), [("real", "--data"), ("gpu", "--gpu")])
def test_a_part_that_lacks_what_it_measures_is_told(part: str, needed: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"--cells {part} needs {needed}"):
        compare.run(Options(True, None, "cpu", tmp_path, [part]))
