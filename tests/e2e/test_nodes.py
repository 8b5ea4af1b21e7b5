"""Three nodes, two gateways, and every failure in turn: the service goes on."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PROCESS_HANGS_AFTER_S

from e2e.cluster import ROOT, with_tests
from e2e.pretend_nodes import BROKEN, CLIENTS
from pliant import ray_settings
from pliant.bench.ray_session import running

Phases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phases]:
    """What `pretend_nodes` reports; one run for all tests."""
    folder = tmp_path_factory.mktemp("nodes")
    settings = {
        **ray_settings.ENVIRONMENT,
        **with_tests(),
        "RAY_AUTH_MODE": "disabled",
        BROKEN: str(folder / "broken"),
    }
    command = [sys.executable, str(ROOT / "tests" / "e2e" / "pretend_nodes.py"), str(folder / "phases.json")]
    with (
        tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as ray_folder,
        running(command, Path(ray_folder), settings) as started,
    ):
        assert started.process.wait(PROCESS_HANGS_AFTER_S) == 0, started.tail()
        yield json.loads((folder / "phases.json").read_text())


def answered(phases: Phases, name: str) -> dict[str, Any]:
    """The phase, after checking that every request was answered."""
    phase = phases[name]
    assert set(phase["outcomes"]) == {"ok"}, phase
    return phase


@pytest.mark.parametrize("name", ["short texts", "long texts", "short texts again"])
def test_two_gateways_follow_the_plan_and_no_request_fails(phases: Phases, name: str) -> None:
    assert answered(phases, name)["plan"]["moves"] > 0


def test_a_killed_planner_comes_back_and_no_request_notices(phases: Phases) -> None:
    phase = answered(phases, "planner killed")
    assert phase["held"] == [512, 512, 512, 512]
    assert phase["plan"]["moves"] == 0, "it goes on from what the replicas hold"


def test_a_killed_gateway_takes_only_what_it_was_working_on(phases: Phases) -> None:
    outcomes = phases["gateway killed"]["outcomes"]
    assert sum(count for outcome, count in outcomes.items() if outcome != "ok") <= CLIENTS, outcomes
    answered(phases, "gateway back")


def test_a_removed_node_is_planned_without(phases: Phases) -> None:
    assert answered(phases, "node removed")["plan"]["replicas"] == {"64": 1, "128": 0, "512": 1}


def test_a_kind_that_is_not_ours_is_served_through_all_of_it(phases: Phases) -> None:
    for name in phases.keys() - {"gateway killed"}:
        assert phases[name]["echo"] == [[{"label": name, "score": 1.0}]]


def test_a_length_that_replicas_cannot_load_is_quarantined_and_planned_without(phases: Phases) -> None:
    phase = answered(phases, "node added, 64 broken")
    assert len(phase["held"]) == 4
    assert {"64": "OSError: cannot load 64"} in phase["failed"]
    assert phase["plan"]["failed_moves"] >= 1


def test_a_node_that_is_drained_gives_its_replicas_away_and_loses_nothing(phases: Phases) -> None:
    assert len(answered(phases, "node drained")["held"]) == 4
