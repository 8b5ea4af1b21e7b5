"""Compiled forward passes of a vision transformer, one for each gamma and any number of rows, kept between processes.

The layers of a gamma have shapes of their own, known beforehand, so that each gamma is compiled by itself. It pays on
CPUs: merging takes many small steps, which compiled code does at once. A compile takes half a minute, in a process of
its own.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from pliant.background import run_in_background
from pliant.cache import cache_folder, made, made_once
from pliant.errors import CannotCompileError
from pliant.kernels import compiled_forward
from pliant.kernels.c_compiler import cxx_compiler
from pliant.kernels.runtime_cache import machine
from pliant.models.sources import Progress
from pliant.turns import COMPILE, turn

RECIPE = 1
"""Raised whenever models are compiled in another way, so that older packages are left alone."""
LIMIT_S = 1800.0
"""For one compile; then it is given up."""

Forward = Callable[..., Tensor]
"""(images uint8 [n, height, width, channels][, prompts [n, layers, gamma, hidden]]) -> features [n, hidden]"""


@dataclass(frozen=True)
class VitSpec:
    """What a package is compiled for: a model under one gamma, with 1 to `most_rows` rows, on this machine's CPU."""

    folder: Path
    gamma: int
    dtype: str
    threads: int
    most_rows: int

    @property
    def package(self) -> Path:
        """Where the package lies once it is built."""
        weights = (self.folder / "model.safetensors").resolve()
        identity = [
            RECIPE,
            [str(weights), weights.stat().st_size, weights.stat().st_mtime_ns],
            (self.folder / "config.json").read_text(),
            [self.gamma, self.dtype, self.threads, self.most_rows],
            [torch.__version__, version("timm")],
            machine("cpu"),
        ]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        return cache_folder() / "runtimes" / f"{self.folder.resolve().name}-{self.gamma}-{self.dtype}-{digest[:16]}"


def build(specs: Sequence[VitSpec], progress: Progress | None = None) -> dict[int, str]:
    """Compile the packages that no process has built before, one after the other; other processes wait for them.

    Returns why what could not be compiled could not, by gamma.
    """
    missing = [spec for spec in specs if not made(spec.package)]
    reasons = {}
    for done, spec in enumerate(missing):
        if progress:
            progress(f"compiling for {spec.gamma} tokens a layer", done / len(missing))
        try:
            made_once(spec.package, partial(_compile_apart, spec))
        except CannotCompileError as reason:
            reasons[spec.gamma] = str(reason)
    return reasons


def open_package(package: Path) -> Forward:
    """The forward pass in a package; it leaves the interpreter to other threads while it runs.

    Raises CannotCompileError if what is there cannot be opened.
    """
    try:
        return compiled_forward.load(package / "model")
    except (OSError, RuntimeError) as error:
        raise CannotCompileError(
            f"{package} cannot be opened, so that its model runs uncompiled with this gamma; delete it, to have it "
            f"compiled again: {error}"
        ) from None


def _compile_apart(spec: VitSpec, into: Path) -> None:
    """Compile in a process of its own, with a bounded number of threads and a limit to its time, in turn."""
    compiler = cxx_compiler()
    if compiler is None:
        raise CannotCompileError(
            "No C++ compiler was found (CXX, g++ or clang++), so vision models run uncompiled: answers are the same, "
            "but merging tokens saves less time. Install one (apt-get install g++) and restart."
        )
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "runtimes" / "compiler"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
        "CXX": compiler,
        "OMP_NUM_THREADS": str(spec.threads),
    }
    command = [sys.executable, "-m", "pliant.kernels.vision.compiler", str(spec.folder), f"--gamma={spec.gamma}"]
    command += [f"--dtype={spec.dtype}", f"--threads={spec.threads}", f"--most-rows={spec.most_rows}", f"--into={into}"]
    try:
        with turn(f"compiling {spec.folder.name} for gamma {spec.gamma}", lambda: (COMPILE, 0.0)):
            done = run_in_background(command, environment, LIMIT_S)
    except subprocess.TimeoutExpired:
        raise CannotCompileError(
            f"{spec.folder} took more than {LIMIT_S:.0f} s to compile and runs uncompiled"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CannotCompileError(
            f"{spec.folder} could not be compiled for gamma {spec.gamma} and runs uncompiled; answers are the same, "
            f"but merging tokens saves less time. The compiler's process said: {reason}"
        )
