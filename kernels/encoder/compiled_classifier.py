"""A sequence classifier compiled for one max_length: Arlo's runtime, batch 1 (Arlo §3.1, §5).

A static runtime pads shorter inputs to max_length, a cost that the request scheduler weighs against queueing. A dynamic
one takes every length as it is, at the price that the paper's figure 2 shows. The compiler runs in a process of its
own, so that a replica never holds its memory, and a compiled runtime loads without transformers.
"""

import argparse
import functools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pliant.background import run_in_background, work_in_background
from pliant.cache import cache_folder, made
from pliant.errors import CannotCompileError
from pliant.kernels import compiled_forward
from pliant.kernels.compiled_forward import find_compiler
from pliant.kernels.cuda_graph import CudaGraph, Forward
from pliant.kernels.runtime_cache import SHORTEST_DYNAMIC, RuntimeSpec, package, package_folder
from pliant.turns import COMPILE, turn

if TYPE_CHECKING:
    from pliant.kernels.encoder.eager_classifier import EagerClassifier

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""How far a runtime's logits may lie from the unpadded eager model's, in units of the largest logit or 1, whichever is
more, and importance likewise. A package that does not keep it is never used."""

_SOON = -math.inf
"""The urgency of what somebody waits for."""

_warn_once = functools.cache(logging.getLogger("pliant").warning)


class Output(NamedTuple):
    """What a classifier says of one text."""

    logits: np.ndarray
    """float32 [labels]."""
    importance: np.ndarray | None
    """float32 [tokens]: the attention that each token received (see `importance.received`), if the runtime gives it."""


class Runtime:
    """A classifier that answers one input of up to `max_length` tokens at a time.

    `backend` is "aoti" (compiled), "cuda-graph" (compiled, and one launch on the GPU) or "eager" (not compiled).
    `dynamic` tells whether it computes an input at its own length instead of `max_length`, as "eager" always does, and
    `importance` whether `forward` returns that of each token behind the logits.
    Any thread may call it, but one at a time: the input buffer is reused.
    """

    def __init__(
        self,
        forward: Forward,
        backend: str,
        max_length: int,
        *,
        pad: int,
        vocabulary: int,
        dynamic: bool = False,
        importance: bool = False,
    ) -> None:
        self.max_length = max_length
        self.backend = backend
        self.dynamic = dynamic or backend == "eager"
        self.importance = importance
        self._narrowest = 1 if backend == "eager" else SHORTEST_DYNAMIC
        self._pad = pad
        self._vocabulary = vocabulary
        self._buffer = torch.ones(2 * max_length, dtype=torch.int64, pin_memory=backend == "cuda-graph")
        self._forward = CudaGraph(forward, self._buffer.view(2, -1)) if backend == "cuda-graph" else forward

    def __call__(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """The logits, float32 (labels,), of the text with these token ids, special tokens included.

        Raises ValueError as `run` does.
        """
        return self.run(ids).logits

    def run(self, ids: np.ndarray | Sequence[int]) -> Output:
        """What there is to say of the text with these token ids, special tokens included.

        Raises `ValueError` if there are no ids, more than `max_length`, or one that is not in the vocabulary.
        """
        length = len(ids)
        if not 0 < length <= self.max_length:
            raise ValueError(f"got {length} token ids; this runtime takes 1 to {self.max_length}")
        width = max(length, self._narrowest) if self.dynamic else self.max_length
        inputs = self._buffer[: 2 * width].view(2, width)  # compiled code takes no strides but its own
        row, mask = inputs.numpy()
        text = row[:length]
        text[:] = ids
        if text.min() < 0 or text.max() >= self._vocabulary:
            raise ValueError(f"token ids must lie in 0 to {self._vocabulary - 1}; got {text.min()} to {text.max()}")
        row[length:] = self._pad
        mask[:length] = 1
        mask[length:] = 0
        output = self._forward(inputs).numpy()
        if not self.importance:
            return Output(output, None)
        return Output(output[:-width], output[-width:][:length])


def load(
    folder: Path,
    max_length: int,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    dynamic: bool = False,
    importance: bool = False,
    compiling: bool = True,
) -> Runtime:
    """The classifier in `folder` for inputs of up to `max_length` tokens; compiled first if it is not in the cache.

    Loading takes tens of milliseconds, compiling 15 s or more, during which other processes that want the same package
    wait. Where it cannot be compiled (no C++ compiler, an architecture that torch.export rejects), the "pliant" logger
    warns and the eager model answers instead. Without `compiling` it also answers where nothing is in the cache yet.
    Sets this process's number of torch threads to `threads`.
    With `importance` the runtime tells for each text how much attention its tokens received (see `Runtime.run`).
    Raises `ModelError` if `folder` holds no sequence classifier, the model cannot take `max_length` tokens, or it has
    no attention weights that would tell.
    """
    spec = RuntimeSpec(Path(folder), max_length, device, dtype, threads, dynamic, importance)
    spec.check()
    torch.set_num_threads(threads)
    try:
        if compiling or made(package_folder(spec)):
            return _open(package(spec, functools.partial(_compile_apart, spec, lambda: _SOON)), spec)
    except CannotCompileError as reason:
        _warn_once(str(reason))
    from pliant.kernels.encoder.eager_classifier import EagerClassifier

    model = EagerClassifier(spec.folder, device=device, dtype=dtype, importance=importance)
    return Runtime(
        lambda inputs: model.unpadded(inputs[0].to(device)).cpu(),
        "eager",
        max_length,
        importance=importance,
        **model.facts,
    )


def prepare(
    folder: Path,
    max_length: int,
    urgency: Callable[[], float] = lambda: _SOON,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    dynamic: bool = False,
    importance: bool = False,
) -> None:
    """Compile what `load` with these arguments asks for, at low priority and when no other heavy work runs here.

    Of compilations that wait, the one with the least `urgency` is next. Raises `ModelError` as `load` does, and
    `CannotCompileError`.
    """
    spec = RuntimeSpec(Path(folder), max_length, device, dtype, threads, dynamic, importance)
    spec.check()
    package(spec, functools.partial(_compile_apart, spec, urgency))


def is_prepared(folder: Path, max_length: int, **options: Any) -> bool:
    """Whether `load` with these arguments has nothing to compile."""
    return made(package_folder(RuntimeSpec(Path(folder), max_length, **options)))


def _open(folder: Path, spec: RuntimeSpec) -> Runtime:
    """The runtime in a package.

    For a GPU it uses the class under `torch._inductor.aoti_load_package`, whose import alone takes 2 s and 85 MB.
    """
    facts = json.loads((folder / "runtime.json").read_text())
    options = {"dynamic": spec.dynamic, "importance": spec.importance, **facts}
    if spec.device == "cpu":
        return Runtime(compiled_forward.load(folder / "model"), "aoti", spec.max_length, **options)
    # Single-threaded: without the locks that cannot be captured in a CUDA graph.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(folder / "model"), "model", True, 1, -1)
    if spec.dynamic:
        return Runtime(lambda inputs: loader.run([inputs.to(spec.device)])[0].cpu(), "aoti", spec.max_length, **options)
    return Runtime(lambda inputs: loader.run([inputs])[0], "cuda-graph", spec.max_length, **options)


def can_compile(spec: RuntimeSpec) -> bool:
    """Whether `load` can give a compiled runtime: it has been compiled before, or a C++ compiler is there."""
    return package_folder(spec).exists() or find_compiler() is not None


def _compile_apart(spec: RuntimeSpec, urgency: Callable[[], float], into: Path) -> None:
    """Compile in a process of its own, with a bounded number of threads, when it is its turn."""
    compiler = find_compiler()
    if compiler is None:
        raise CannotCompileError(
            "No C++ compiler was found (CXX, g++ or clang++), so classifiers run uncompiled: answers are the same, but "
            "take about twice as long. Install one (apt-get install g++) and restart."
        )
    threads = str(spec.threads)
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "runtimes" / "compiler"),
        "TORCHINDUCTOR_COMPILE_THREADS": threads,
        **os.environ,
        "CXX": compiler,
        "OMP_NUM_THREADS": threads,
    }
    command = [
        sys.executable,
        "-m",
        "pliant.kernels.encoder.compiled_classifier",
        str(spec.folder),
        str(spec.max_length),
    ]
    command += ["--device", spec.device, "--dtype", spec.dtype, "--threads", threads, "--into", str(into)]
    command += ["--dynamic"] * spec.dynamic + ["--importance"] * spec.importance
    with turn(f"compiling {spec.folder.name} for {spec.max_length} tokens", lambda: (COMPILE, urgency())):
        done = run_in_background(command, environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CannotCompileError(
            f"{spec.folder} could not be compiled for {'up to ' * spec.dynamic}{spec.max_length} tokens and runs "
            f"uncompiled, about half as fast. The compiler's process said: {reason}"
        )


def main() -> None:
    """Compile one package and check its answers; `load` and `prepare` run this in a process of its own."""
    from pliant.kernels.encoder.classifier_compiler import compile_into
    from pliant.kernels.encoder.eager_classifier import EagerClassifier

    parser = argparse.ArgumentParser(
        prog="python -m pliant.kernels.encoder.compiled_classifier", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="holds config.json and model.safetensors")
    parser.add_argument("max_length", type=int, help="in tokens")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one forward pass")
    parser.add_argument("--dynamic", action="store_true", help="for any length up to max_length")
    parser.add_argument("--importance", action="store_true", help="to give that of each token too")
    parser.add_argument("--into", type=Path, required=True, help="an existing folder, which receives the package")
    arguments = vars(parser.parse_args())
    work_in_background()
    into = arguments.pop("into")
    spec = RuntimeSpec(**arguments)
    spec.check()
    torch.set_num_threads(spec.threads)
    model = EagerClassifier(spec.folder, device=spec.device, dtype=spec.dtype, importance=spec.importance)
    compile_into(into, model, spec)
    _verify(_open(into, spec), model, spec)


def _verify(runtime: Runtime, model: "EagerClassifier", spec: RuntimeSpec) -> None:
    """Raise if the runtime and the unpadded eager model disagree on random texts of several lengths."""
    facts = model.facts
    words = np.setdiff1d(np.arange(facts["vocabulary"]), [facts["pad"]])
    lengths = {1, (spec.max_length + 1) // 2, spec.max_length}
    if spec.dynamic:
        lengths |= {SHORTEST_DYNAMIC, spec.max_length // 5 + 1, spec.max_length - 1}
    for length in sorted(lengths):
        ids = np.random.default_rng(length).choice(words, length)
        inputs = torch.from_numpy(np.stack([ids, np.ones_like(ids)]))
        expected = model(inputs.to(spec.device)).cpu().numpy()
        logits, importance = runtime.run(ids)
        _compare("logits", logits, expected[: len(logits)], spec)
        if importance is not None:
            _compare("importance", importance, expected[len(logits) :], spec)


def _compare(what: str, compiled: np.ndarray, eager: np.ndarray, spec: RuntimeSpec) -> None:
    difference = np.abs(compiled - eager).max() / max(1.0, np.abs(eager).max())
    if not difference <= TOLERANCE[spec.dtype]:
        raise ArithmeticError(f"compiled and eager {what} differ by {difference:.1e}")


if __name__ == "__main__":
    main()
