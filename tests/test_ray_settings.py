"""Ray understands the switches that pliant gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pliant import ray_settings
from pliant.deployments import app

_STARTS_S = 30
"""What another replica may take, on a busy machine."""


SERVE, LOG_MONITOR = "ray.serve._private.constants", "ray._private.log_monitor"
CONSTANTS = {
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "ray._private.ray_constants",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "ray._private.ray_constants",
    "HTTP_PROXY_TIMEOUT": SERVE,
    "PROXY_READY_CHECK_TIMEOUT_S": SERVE,
    "CONTROL_LOOP_INTERVAL_S": SERVE,
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": LOG_MONITOR,
    "LOG_NAME_UPDATE_INTERVAL_S": LOG_MONITOR,
}
"""And the modules of Ray in which they are."""


@pytest.fixture(scope="module")
def understood() -> dict[str, float]:
    """What Ray makes of the switches, by constant."""
    code = (
        "import importlib, json, sys\n"
        "print(json.dumps({name: float(getattr(importlib.import_module(module), name))"
        " for name, module in json.loads(sys.argv[1]).items()}))"
    )
    given = {**os.environ, **ray_settings.ENVIRONMENT}
    command = [sys.executable, "-c", code, json.dumps(CONSTANTS)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_a_process_that_gets_no_memory_ends_at_once(understood: dict[str, float]) -> None:
    """Ray's own handler of an abort takes memory: where there is none it aborts, and is called again, 8,207 times in
    a gateway whose raylet died a tenth of a second later."""
    assert understood["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] == 1


def test_replicas_of_a_node_that_ends_stay_until_there_are_others(understood: dict[str, float]) -> None:
    """Serve stops those of a draining node at once when the rest of its time is not more than they may take to end."""
    drains_s = understood["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
    assert drains_s >= app._HEALTH["graceful_shutdown_timeout_s"] + _STARTS_S


def test_a_busy_machine_may_take_as_long_to_start_the_edge_as_serve_waits_for_it(understood: dict[str, float]) -> None:
    assert understood["PROXY_READY_CHECK_TIMEOUT_S"] >= understood["HTTP_PROXY_TIMEOUT"]


def test_an_idle_cluster_is_quiet(understood: dict[str, float]) -> None:
    """As it would not be after another version of Ray gave these another name."""
    assert understood["CONTROL_LOOP_INTERVAL_S"] == 0.25
    assert understood["RAY_LOG_MONITOR_MANY_FILES_THRESHOLD"] == 0
    assert understood["LOG_NAME_UPDATE_INTERVAL_S"] == 2


def test_threads_that_wait_for_each_other_soon_sleep() -> None:
    """Awake they would keep a core from those they wait for, many times in a pass (`python -m bench threads`)."""
    given = {**os.environ, **ray_settings.ENVIRONMENT, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=given, capture_output=True, text=True, check=True)
    if "GOMP_" not in done.stderr:
        pytest.skip("torch's threads are not those of GNU's OpenMP here")
    assert f"GOMP_SPINCOUNT = '{ray_settings.ENVIRONMENT['GOMP_SPINCOUNT']}'" in done.stderr
