"""`python -m bench threads`: a pass of a model on two threads, alone and beside processes that compute.

Ours waits as `pliant serve` lets threads wait for each other; the others as torch does where nobody says anything, and
asleep from the first moment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from pliant import ray_settings
from pliant.bench.report import Options, Report, ratio
from pliant.bench.threads.passes import THREADS

_WAITS = {
    "ours": {"GOMP_SPINCOUNT": ray_settings.ENVIRONMENT["GOMP_SPINCOUNT"]},
    "default": {},
    "asleep": {"OMP_WAIT_POLICY": "passive"},
}
_COMPUTES = "while True: pass"


def run(options: Options) -> Report:
    """Blocks of all three ways, one after the other."""
    blocks, seconds = (3, 2.0) if options.quick else (7, 5.0)
    figures = []
    for place, busy in (("alone", 0), ("beside_others", len(os.sched_getaffinity(0)))):
        with _computing(busy):
            taken = [{name: _pass_s(wait, seconds) for name, wait in _WAITS.items()} for _ in range(blocks)]
        ours = [each["ours"] for each in taken]
        for other in ("default", "asleep"):
            theirs = [each[other] for each in taken]
            beside = f"{1e3 * min(ours):.1f} and {1e3 * min(theirs):.1f} ms at best"
            figures.append(ratio(f"pass_vs_{other}_{place}", ours, theirs, "≤ 1.1", beside))
    return Report(figures, {"waits": _WAITS, "threads": THREADS, "blocks": blocks, "seconds": seconds}, {})


@contextlib.contextmanager
def _computing(processes: int) -> Iterator[None]:
    """So many processes compute within, each in a session of its own, as other programs of a machine do."""
    started = [subprocess.Popen([sys.executable, "-c", _COMPUTES], start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _pass_s(wait: dict[str, str], seconds: float) -> float:
    """The mean pass of a process whose threads wait for each other in that way."""
    said = {"OMP_NUM_THREADS"}.union(*_WAITS.values())
    kept = {key: value for key, value in os.environ.items() if key not in said}
    command = [sys.executable, "-m", "pliant.bench.threads.passes", str(seconds)]
    return float(subprocess.run(command, env={**kept, **wait}, stdout=subprocess.PIPE, check=True).stdout)
