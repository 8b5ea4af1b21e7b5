"""Whether kernels compute what the readable ones do: the tests' cases of our Triton kernels, then whole steps."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from pliant.bench.gpu import decoder_check, decoders
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale
from pliant.errors import PliantError

_ROOT = Path(__file__).resolve().parents[2]
_CASES = {
    "decoder": "tests/kernels/decoder/triton_cases.py",
    "decoder's linear layers": "tests/kernels/decoder/triton_linear_cases.py",
    "decoder's executor": "tests/kernels/decoder/test_cuda_executor.py",
    "encoder": "tests/kernels/encoder/triton_cases.py",
    "vision": "tests/kernels/vision/triton_cases.py",
}
_FEW = "norms_and_gates or kernels_make_them or graphs_are_few or ties or (16 and None and True and float32)"
"""Which of them are tried in Triton's interpreter, where all would take minutes."""


class WrongNumbersError(PliantError):
    """Cases that failed, in pytest's words."""


def run(record: Record, scale: Scale) -> None:
    """Errors are of the part whose numbers are wrong."""
    for name, file in _CASES.items():
        with record.part(f"cases of the {name}"):
            record.tables[f"cases of the {name}"] = _cases(_ROOT / file, scale.dry)
    for name in ("1B", "14B"):
        with record.part(f"logits and tokens, {name}"):
            errors = decoder_check.check(decoders.shape(name, scale.dry), scale.device)
            record.tables.setdefault("relative_errors", {})[name] = errors


def _cases(file: Path, dry: bool) -> str:
    """pytest's summary of a file's cases; of a few in Triton's interpreter if it is `dry`.

    Raises ModuleNotFoundError without pytest or Triton, and WrongNumbersError if a case fails.
    """
    for package in ("pytest", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ}
    if dry:
        command += ["-k", _FEW]
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise WrongNumbersError(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]
