"""An encoder compiled for one max_length and batch: Arlo's runtime (Arlo §3.1, §5).

A static runtime pads shorter inputs to max_length, a cost that the request scheduler weighs against queueing. A dynamic
one takes every length as it is, at the price that the paper's figure 2 shows. The compiler runs in a process of its
own, so that a replica never holds its memory, and a compiled runtime loads without transformers. On a GPU nothing is
compiled: a static runtime is recorded as a CUDA graph, and what AOTInductor makes there crashes as it is loaded.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pliant.background import run_in_background, work_in_background
from pliant.cache import cache_folder, made
from pliant.errors import CannotCompileError
from pliant.kernels import compiled_forward
from pliant.kernels.c_compiler import cxx_compiler
from pliant.kernels.cuda_graph import CudaGraph, Forward
from pliant.kernels.encoder.texts import Accepted, Output, Text
from pliant.kernels.runtime_cache import SHORTEST_DYNAMIC, RuntimeSpec, package, package_folder
from pliant.turns import COMPILE, turn

if TYPE_CHECKING:
    from pliant.kernels.encoder.eager_classifier import EagerClassifier

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""How far a runtime's logits may lie from the unpadded eager model's, in units of the largest logit or 1, whichever is
more, and importance likewise. A package that does not keep it is never used."""

_SOON = -math.inf
"""The urgency of what somebody waits for."""

_NEEDED = "a C++ compiler (apt-get install g++)"

_warn_once = functools.cache(logging.getLogger("pliant").warning)


class Runtime:
    """An encoder that answers `batch` inputs, or fewer, of up to `max_length` tokens each at a time.

    `backend` is "aoti" (compiled), "cuda-graph" (one launch on the GPU) or "eager" (not compiled).
    `dynamic` tells whether it computes inputs at the length of the longest instead of `max_length`, as "eager" always
    does, and `importance` whether `forward` returns that of each token behind the logits.
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
        token_types: int = 0,
        batch: int = 1,
        dynamic: bool = False,
        importance: bool = False,
    ) -> None:
        self.max_length = max_length
        self.batch = batch
        self.backend = backend
        self.dynamic = dynamic or backend == "eager"
        self.importance = importance
        self._narrowest = 1 if backend == "eager" else SHORTEST_DYNAMIC
        self._pad = pad
        self._accepted = Accepted(max_length, vocabulary, token_types)
        self._rows = rows(token_types)
        size = self._rows * batch * max_length
        self._buffer = torch.ones(size, dtype=torch.int64, pin_memory=backend == "cuda-graph")
        example = self._buffer.view(self._rows, batch, -1)
        self._forward = CudaGraph(forward, example) if backend == "cuda-graph" else forward

    def __call__(self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """The logits (see `Output`) of the text with these token ids, special tokens included.

        Raises ValueError as `run` does.
        """
        return self.run(ids, types).logits

    def run(self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None) -> Output:
        """What there is to say of the text with these token ids, special tokens included; `types` as in `Text`.

        Raises `ValueError` as `run_all`.
        """
        return self.run_all([Text(ids, types)])[0]

    def run_all(self, texts: Sequence[Text]) -> list[Output]:
        """What there is to say of each text; none knows of the others.

        Raises `ValueError` if there are no texts or more than `batch`, and as `Accepted.check` does.
        """
        if not 0 < len(texts) <= self.batch:
            raise ValueError(f"got {len(texts)} texts; this runtime takes 1 to {self.batch}")
        for text in texts:
            self._accepted.check(text)
        lengths = [len(text.ids) for text in texts]
        width = max(*lengths, self._narrowest) if self.dynamic else self.max_length
        count = len(texts) if self.backend == "eager" else self.batch
        inputs = self._buffer[: self._rows * count * width].view(self._rows, count, width)
        places = inputs.numpy()  # compiled code takes no strides but its own
        places[0].fill(self._pad)
        places[1:].fill(0)
        places[1, :, 0] = 1  # of what is no text, too: attention to nothing is not a number
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            places[0, row, :length] = text.ids
            places[1, row, :length] = 1
            if text.types is not None:
                places[2:, row, :length] = text.types
        found = self._forward(inputs).numpy()
        if self.importance:
            return [Output(row[:-width], row[-width:][:length]) for row, length in zip(found, lengths, strict=False)]
        if found.ndim == 3:
            return [Output(row[:length], None) for row, length in zip(found, lengths, strict=False)]
        return [Output(row, None) for row in found[: len(texts)]]


def rows(token_types: int) -> int:
    """How many numbers a runtime is given of each token: its id, the mask, and its type if there are several."""
    return 2 + (token_types > 1)


def load(
    folder: Path,
    max_length: int,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    dynamic: bool = False,
    importance: bool = False,
    batch: int = 1,
    compiling: bool = True,
) -> Runtime:
    """The encoder in `folder` for inputs of up to `max_length` tokens; compiled first if it is not in the cache.

    Loading takes tens of milliseconds, compiling 15 s or more, during which other processes that want the same package
    wait. Where it cannot be compiled (no C++ compiler, an architecture that torch.export rejects), the "pliant" logger
    warns and the eager model answers instead. Without `compiling` it also answers where nothing is in the cache yet. It
    also answers on a GPU, where it is recorded as a CUDA graph for one length, if that can be done.
    Sets this process's number of torch threads to `threads`.
    With `importance` the runtime tells for each text how much attention its tokens received (see `Runtime.run`).
    Raises `ModelError` if `folder` holds no sequence classifier, the model cannot take `max_length` tokens, or it has
    no attention weights that would tell.
    """
    spec = RuntimeSpec(Path(folder), max_length, device, dtype, threads, dynamic, importance, batch)
    spec.check()
    torch.set_num_threads(threads)
    try:
        if device == "cpu" and (compiling or made(package_folder(spec))):
            return _open(package(spec, functools.partial(_compile_apart, spec, lambda: _SOON)), spec)
    except CannotCompileError as reason:
        _warn_once(str(reason))
    from pliant.kernels.encoder.eager_classifier import EagerClassifier

    model = EagerClassifier(spec.folder, device=device, dtype=dtype, importance=importance)
    options: dict[str, Any] = {"batch": batch, "importance": importance, **model.facts}
    if device == "cuda" and not dynamic:
        try:
            return Runtime(functools.partial(_run_recorded, model), "cuda-graph", max_length, **options)
        except RuntimeError as reason:
            _warn_once(f"{spec.folder} cannot be recorded as a CUDA graph, and is slow on short texts: {reason}")
    return Runtime(functools.partial(_run_eagerly, model, device), "eager", max_length, **options)


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
    batch: int = 1,
) -> None:
    """Compile what `load` with these arguments asks for, at low priority and when no other heavy work runs here; on a
    GPU nothing.

    Of compilations that wait, the one with the least `urgency` is next. Raises `ModelError` as `load` does, and
    `CannotCompileError`.
    """
    spec = RuntimeSpec(Path(folder), max_length, device, dtype, threads, dynamic, importance, batch)
    spec.check()
    if device == "cpu":
        package(spec, functools.partial(_compile_apart, spec, urgency))


def is_prepared(folder: Path, max_length: int, **options: Any) -> bool:
    """Whether `load` with these arguments has nothing to compile."""
    spec = RuntimeSpec(Path(folder), max_length, **options)
    return spec.device != "cpu" or made(package_folder(spec))


def _open(folder: Path, spec: RuntimeSpec) -> Runtime:
    """The runtime in a package."""
    facts = json.loads((folder / "runtime.json").read_text())
    options = {"dynamic": spec.dynamic, "importance": spec.importance, "batch": spec.batch, **facts}
    return Runtime(compiled_forward.load(folder / "model"), "aoti", spec.max_length, **options)


@torch.inference_mode()
def _run_eagerly(model: "EagerClassifier", device: str, inputs: torch.Tensor) -> torch.Tensor:
    inputs = inputs.to(device)
    alone = inputs.shape[1] == 1
    types = inputs[2] if len(inputs) > 2 else None
    found = model.model.padded(inputs[0], None if alone else inputs[1], types, importance=model.importance)
    return found.cpu()


@torch.inference_mode()
def _run_recorded(model: "EagerClassifier", inputs: torch.Tensor) -> torch.Tensor:
    return model.forward(inputs)


def _compile_apart(spec: RuntimeSpec, urgency: Callable[[], float], into: Path) -> None:
    """Compile in a process of its own, with a bounded number of threads, when it is its turn."""
    compiler = cxx_compiler()
    if compiler is None:
        raise CannotCompileError(
            "No C++ compiler was found (CXX, g++ or clang++), so classifiers run uncompiled: answers are the same, but "
            f"take longer, small models on CPUs by half. Install {_NEEDED} and restart."
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
    command += ["--dtype", spec.dtype, "--threads", threads, "--into", str(into)]
    command += ["--batch", str(spec.batch)] + ["--dynamic"] * spec.dynamic + ["--importance"] * spec.importance
    with turn(f"compiling {spec.folder.name} for {spec.max_length} tokens", lambda: (COMPILE, urgency())):
        done = run_in_background(command, environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CannotCompileError(
            f"{spec.folder} could not be compiled for {'up to ' * spec.dynamic}{spec.max_length} tokens and runs "
            f"uncompiled, small models on CPUs a third slower. It takes {_NEEDED}. The compiler's process said: "
            f"{reason}"
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
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one forward pass")
    parser.add_argument("--dynamic", action="store_true", help="for any length up to max_length")
    parser.add_argument("--importance", action="store_true", help="to give that of each token too")
    parser.add_argument("--batch", type=int, default=1, help="texts at a time")
    parser.add_argument("--into", type=Path, required=True, help="an existing folder, which receives the package")
    arguments = vars(parser.parse_args())
    work_in_background()
    into = arguments.pop("into")
    spec = RuntimeSpec(**arguments)
    spec.check()
    torch.set_num_threads(spec.threads)
    model = EagerClassifier(spec.folder, device="cpu", dtype=spec.dtype, importance=spec.importance)
    compile_into(into, model, spec)
    _verify(_open(into, spec), model, spec)


def _verify(runtime: Runtime, model: "EagerClassifier", spec: RuntimeSpec) -> None:
    """Raise if the runtime and the unpadded eager model disagree on random texts of several lengths."""
    facts = model.facts
    words = np.setdiff1d(np.arange(facts["vocabulary"]), [facts["pad"]])
    lengths = {1, (spec.max_length + 1) // 2, spec.max_length}
    if spec.dynamic:
        lengths |= {SHORTEST_DYNAMIC, spec.max_length // 5 + 1, spec.max_length - 1}
    texts = []
    for length in sorted(lengths):
        rng = np.random.default_rng(length)
        texts.append(Text(rng.choice(words, length), rng.integers(0, max(1, facts["token_types"]), length)))
    for begin in range(0, len(texts), spec.batch):
        part = texts[begin : begin + spec.batch]
        for text, output in zip(part, runtime.run_all(part), strict=True):
            _verify_one(output, text, model, spec)


def _verify_one(output: Output, text: Text, model: "EagerClassifier", spec: RuntimeSpec) -> None:
    ids, types = (torch.from_numpy(np.asarray(each)) for each in (text.ids, text.types))
    expected = model.unpadded(ids, types if model.facts["token_types"] > 1 else None).numpy()
    _compare("answers", output.logits, expected[: len(output.logits)], spec)
    if output.importance is not None:
        _compare("importance", output.importance, expected[len(output.logits) :], spec)


def _compare(what: str, compiled: np.ndarray, eager: np.ndarray, spec: RuntimeSpec) -> None:
    difference = np.abs(compiled - eager).max() / max(1.0, np.abs(eager).max())
    if not difference <= TOLERANCE[spec.dtype]:
        raise ArithmeticError(f"compiled and eager {what} differ by {difference:.1e}")


if __name__ == "__main__":
    main()
