"""Looking at the nodes of a Ray that is not there. Of one that is: e2e/test_doctor.py."""

from __future__ import annotations

import pytest

from pliant.cli.doctor_facts import machine
from pliant.deployments import nodes
from pliant.errors import PliantError


def test_a_ray_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(nodes, "_IN_ALL_S", 0.1)
    with pytest.raises(PliantError, match=r"no answer within 0\.1 s"):
        nodes.visit(machine)
