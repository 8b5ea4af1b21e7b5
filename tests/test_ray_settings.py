"""Ray understands the switches that pliant gives it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pliant import ray_settings
from pliant.deployments import app

_STARTS_S = 30
"""What another replica may take, on a busy machine."""


def understood(constant: str, module: str = "ray._private.ray_constants") -> str:
    """What Ray makes of the switches."""
    code = f"import {module}; print({module}.{constant})"
    given = {**os.environ, **ray_settings.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_process_that_gets_no_memory_ends_at_once() -> None:
    """Ray's own handler of an abort takes memory: where there is none it aborts, and is called again, 8,207 times in
    a gateway whose raylet died a tenth of a second later."""
    assert understood("RAY_DISABLE_FAILURE_SIGNAL_HANDLER") == "True"


def test_replicas_of_a_node_that_ends_stay_until_there_are_others() -> None:
    """Serve stops those of a draining node at once when the rest of its time is not more than they may take to end."""
    drains_s = float(understood("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"))
    assert drains_s >= app._HEALTH["graceful_shutdown_timeout_s"] + _STARTS_S


def test_a_busy_machine_may_take_as_long_to_start_the_edge_as_serve_waits_for_it() -> None:
    constants = "ray.serve._private.constants"
    waits_s = float(understood("HTTP_PROXY_TIMEOUT", constants))
    assert float(understood("PROXY_READY_CHECK_TIMEOUT_S", constants)) >= waits_s


def test_threads_that_wait_for_each_other_soon_sleep() -> None:
    """Awake they would keep a core from those they wait for, many times in a pass (`python -m bench threads`)."""
    given = {**os.environ, **ray_settings.ENVIRONMENT, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=given, capture_output=True, text=True, check=True)
    if "GOMP_" not in done.stderr:
        pytest.skip("torch's threads are not those of GNU's OpenMP here")
    assert f"GOMP_SPINCOUNT = '{ray_settings.ENVIRONMENT['GOMP_SPINCOUNT']}'" in done.stderr
