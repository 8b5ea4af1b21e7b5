"""What works in the background ends with whoever started it, and lets others go first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until

from pliant.background import BEHIND_OTHERS, run_in_background

WORKER = """
import os, time
from pliant.background import work_in_background
work_in_background()
print(os.getpid(), os.nice(0), flush=True)
if os.path.exists("/proc/self/autogroup"):
    print(open("/proc/self/autogroup").read(), flush=True)
time.sleep({seconds})
"""
PARENT = """
import os, sys
from pliant.background import run_in_background
print(os.getpid(), flush=True)
run_in_background([sys.executable, "-c", sys.argv[1]], os.environ)
"""


def test_it_stands_behind_others_and_says_what_it_came_to() -> None:
    done = run_in_background([sys.executable, "-c", WORKER.format(seconds=0)], os.environ)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) == min(19, os.nice(0) + BEHIND_OTHERS)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux shares by process here")
def test_its_session_stands_behind_other_sessions() -> None:
    done = run_in_background([sys.executable, "-c", WORKER.format(seconds=0)], os.environ)
    ours = Path("/proc/self/autogroup").read_text()
    assert done.stdout.split()[-2:] == ["nice", str(BEHIND_OTHERS)]
    assert not ours.endswith(f"nice {BEHIND_OTHERS}\n")


def test_it_ends_with_whoever_started_it() -> None:
    command = [sys.executable, "-c", PARENT, WORKER.format(seconds=3600)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    parent.stdout.readline()
    [worker] = wait_until(lambda: psutil.Process(parent.pid).children())
    wait_until(lambda: worker.nice() >= BEHIND_OTHERS)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
