"""What `pliant serve` says before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pliant.cli import doctor_facts
from pliant.cli.serve import _warn_of_few_cpus
from pliant.deployments.kinds import read

CLUSTER = Path(__file__).parents[2] / "cluster.yaml"


@pytest.mark.parametrize(
    ("processors", "ray_runs", "warns"), [(1, False, True), (1, True, False), (64, False, False), (None, False, True)]
)
def test_a_machine_of_too_few_processors_is_told(
    processors: int | None,
    ray_runs: bool,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setattr(doctor_facts, "ray_runs", lambda: ray_runs)
    monkeypatch.setattr(doctor_facts, "reserved", lambda cluster: (3.1, 0.0))
    _warn_of_few_cpus(read(CLUSTER))
    said = " ".join(capsys.readouterr().out.split())
    assert ("The file wants 3.1 CPUs, and this machine has 1: replicas will wait for a place" in said) == warns
    assert ("lower `cpus` or `replicas`, or add nodes" in said) == warns
