"""python -m bench gpu: what a GPU's first day must answer, in stages that each have a process, a limit and a JSON.

A stage that fails or is not done in time leaves what it has found and why it ended, and the next one runs. Without a
GPU, `--dry` runs all of them on a CPU with tiny shapes, as on an image that has CUDA, torch, Triton and transformers
and little beside.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pliant.bench.gpu import profiles
from pliant.bench.gpu.record import end_early

LIMITS_S = {
    "probe": 60,
    "correctness": 150,
    "decode": 330,
    "engine": 210,
    "encoders": 330,
    "vision": 180,
    "serving": 300,
}
"""How long each stage may take, in the order in which they run."""
_TO_STOP_S = 5


def main(arguments: Sequence[str]) -> int:
    """Run the stages; 0 if none failed. What was skipped, and why, is printed and no failure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny, without what a bare CUDA image lacks")
    parser.add_argument("--stages", nargs="+", choices=LIMITS_S, default=list(LIMITS_S), metavar="STAGE")
    parser.add_argument("--out", type=Path, default=Path("bench-out/gpu"), help="receives a JSON for each stage")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in LIMITS_S if name in given.stages and not run(name, given.out, given.dry, LIMITS_S[name])]
    profiles.write(given.out)
    print(f"Written to {given.out}." + f" Failed: {', '.join(failed)}." * bool(failed), flush=True)
    return int(bool(failed))


def run(name: str, out: Path, dry: bool, limit_s: float) -> bool:
    """Whether a stage, in a process group of its own that ends with it, came to its end without an error."""
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pliant.bench.gpu.stage", name, "--out", str(out)] + ["--dry"] * dry
    print(f"{name}: at most {limit_s:.0f} s", flush=True)
    begun = time.monotonic()
    process = subprocess.Popen(command, env=_environment(), start_new_session=True)
    try:
        reason = f"its process ended with status {process.returncode}" if process.wait(limit_s) else ""
    except subprocess.TimeoutExpired:
        reason = f"it was not done within {limit_s:.0f} s"
    finally:
        _stop(process)
    if reason:
        end_early(file, name, " ".join(command), reason)
    found = json.loads(file.read_text())
    _show(found, time.monotonic() - begun)
    return not found["errors"]


def _environment() -> dict[str, str]:
    """That of this process; sources need not be installed, and what is compiled is kept where it can be written."""
    sources = str(Path(__file__).resolve().parents[2] / "src")
    kept = str(Path(tempfile.gettempdir()) / "pliant-bench-gpu")
    path = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
    return {"PLIANT_CACHE": kept, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """All that is left of a stage's processes, the one that was started first."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        try:
            process.wait(_TO_STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _show(found: dict[str, dict[str, object]], took_s: float) -> None:
    for name, value in found["figures"].items():
        print(f"  {name:48} {value:10.4g}")
    for what, reasons in (("skipped", found["skipped"]), ("failed", found["errors"])):
        for name, reason in reasons.items():
            print(f"  {what}: {name}: {str(reason).strip().splitlines()[-1]}")
    print(f"  {took_s:.0f} s", flush=True)
