"""Measures how a classifier's latency grows with length on each kind of runtime, and finds its staircase (Arlo §3.2).

A dynamic runtime is compiled once and measured in fine steps, beside a packed one if the model has one here. Each
compile costs 10 s of a processor or more. So the uncompiled model is measured in place of the dynamic runtime where
that would have to save more of its time than it ever did to serve instead of the packed one. Nor does any static length
follow where static ones would have to save more of the dynamic one's time than they ever did. Else the two that decide
come first: a short one, where static code saves the most, and the longest. More follow only if static ones would serve
if all of them saved as much as the better of these two. All of them are the packages that serving loads later.

`python -m pliant.kernels.encoder.latency_profile GIVEN` prints the profile for a `RuntimeSpec`, given in JSON: replicas
whose own runtime needs no torch have it measured so.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pliant.background import run_in_background, work_in_background
from pliant.errors import CannotCompileError, ModelError, PliantError
from pliant.formats.profile import EVEN_BINS, Profile, kept, worthwhile_s
from pliant.kernels.encoder import packed_runtime, timed_runtime
from pliant.kernels.encoder.packed_runtime import PackedRuntime
from pliant.kernels.runtime_cache import RuntimeSpec, can_compile, device_name
from pliant.models.sources import Progress

if TYPE_CHECKING:
    from pliant.kernels.encoder.compiled_classifier import Runtime

RECIPE = 5
"""Raised whenever profiles are measured in another way, so that older ones are left alone."""

_FINEST = 8
"""Tokens between measured lengths, or a multiple of it for a model whose texts are so long that there were too many."""
_MOST_LENGTHS = 64
_ROUNDS = (4, 20)
"""The fewest and the most times that each length is measured; in between, the seconds below decide."""
_CURVE_S = 10.0
_POINT_S = 2.0

_PLATEAU = 3
"""The least number of measured lengths between jumps."""
_JUMP = 0.03
"""The least rise from the median of that many lengths to that of as many more, as a share of the former."""
_SUDDEN = 0.5
"""The least share of the range of both that lies in the jump; on a straight line it is a fifth."""
_FASTEST_STATIC = 0.9
"""The least share of a dynamic runtime's time that a static one may be hoped to take where there is a packed one: on
CPUs it took 0.93."""
_FASTEST_DYNAMIC = 0.5
"""The least share of the uncompiled model's time that a dynamic runtime may be hoped to take where there is a packed
one: on CPUs it took 0.68 with one layer, and 0.72 and more with several."""
_STAIRCASE = 0.5
"""The least share of the whole rise that jumps must make up, or the curve is called smooth."""


def profile(
    folder: Path,
    longest: int,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    static: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """The profile of the classifier in `folder` for up to `longest` tokens; measured first if none of a model of its
    shape is in the cache.

    With `static`, other runtimes are compiled even where a packed one is faster than they could be. Measuring takes
    about a minute on a CPU if anything is compiled: in this process if it is to report its `progress`, or else in one
    of its own. Raises ModelError as `compiled_classifier.load` does.
    """
    spec = RuntimeSpec(Path(folder), longest, device, dtype, threads, dynamic=True)
    spec.check()
    name = f"{spec.shape_name()}-{RECIPE}" + "-static" * static + "-uncompiled" * (not can_compile(spec))
    found = kept(name, lambda: measure_profile(spec, progress, static) if progress else _measured_apart(spec, static))
    return found.model_copy(update={"model": _name(spec)})


def _name(spec: RuntimeSpec) -> str:
    return spec.folder.resolve().name


def _measured_apart(spec: RuntimeSpec, static: bool) -> Profile:
    given = json.dumps({"spec": {**asdict(spec), "folder": str(spec.folder)}, "static": static})
    done = run_in_background([sys.executable, "-m", __name__, given], os.environ)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ModelError(f"{spec.folder} could not be profiled: {reason or f'exit status {done.returncode}'}")
    return Profile.model_validate_json(done.stdout.strip().rpartition("\n")[2])


def measure_profile(spec: RuntimeSpec, progress: Progress, static: bool = False) -> Profile:
    """The profile of the dynamic runtime `spec` against others. Times are the least of interleaved calls."""
    from pliant.kernels.encoder import compiled_classifier  # brings torch: a profile that is there is read without

    def runtime(length: int, dynamic: bool, compiling: bool = True) -> "Runtime":
        return compiled_classifier.load(
            spec.folder,
            length,
            device=spec.device,
            dtype=spec.dtype,
            threads=spec.threads,
            dynamic=dynamic,
            compiling=compiling,
        )

    lengths = _grid(spec.max_length)
    progress("loading the model", 0.0)
    packed = _packed(spec)
    dynamic = runtime(spec.max_length, True, compiling=False) if packed and not static else None
    if packed is None or dynamic is None or _may_serve(dynamic, packed, lengths):
        progress(f"compiling for any length up to {spec.max_length}", 0.0)
        dynamic = runtime(spec.max_length, True)
    calls = [(each, length) for each in (dynamic, packed) if each for length in lengths]
    found = _rounds(calls, _CURVE_S, lambda done: progress("measuring every length", 0.3 + 0.2 * done))
    rounds, packed_s = found[:, : len(lengths)], found[:, len(lengths) :].min(axis=0)
    curve = rounds.min(axis=0)
    steps = find_steps(lengths, rounds)

    ratios: dict[int, float] = {}
    most = worthwhile_s("dynamic", 1.0)  # of the dynamic one's time, that static ones may take to serve
    if packed is not None and not static:
        least_s = worthwhile_s("packed", packed_s.mean())
        if curve.mean() > least_s:  # the packed one serves, not the dynamic one
            most = least_s / curve.mean()
    deciding = _deciding(lengths, steps) if most >= _FASTEST_STATIC else []
    for count, length in enumerate(deciding):
        if count == 2 and min(ratios.values()) > most:
            break
        progress(f"compiling for {length} tokens", 0.5 + 0.5 * count / len(deciding))
        seconds = _rounds([(runtime(length, False), length), (dynamic, length)], _POINT_S).min(axis=0)
        ratios[length] = seconds[0] / seconds[1]
    progress("measured", 1.0)
    measured = sorted(ratios)
    static_s = curve * np.interp(lengths, measured, [ratios[length] for length in measured]) if ratios else np.array([])
    return Profile(
        model=_name(spec),
        device=device_name(spec.device),
        dtype=spec.dtype,
        threads=spec.threads,
        torch=version("torch"),
        lengths=lengths,
        dynamic_s=tuple(curve.tolist()),
        compiled=dynamic.backend == "aoti",
        static_s=tuple(static_s.tolist()),
        static_at=tuple(measured),
        packed_s=tuple(packed_s.tolist()),
        passes=packed.times if packed else None,
        steps=steps,
    )


def _may_serve(uncompiled: "Runtime", packed: PackedRuntime, lengths: Sequence[int]) -> bool:
    """Whether it could be so much faster, once it is compiled, that it would serve."""
    some = lengths[:: -(-len(lengths) // EVEN_BINS)]
    seconds = _rounds([(each, length) for each in (uncompiled, packed) for length in some], _POINT_S).min(axis=0)
    uncompiled_s, packed_s = (float(each.mean()) for each in np.split(seconds, 2))
    return _FASTEST_DYNAMIC * uncompiled_s <= worthwhile_s("packed", packed_s)


def _packed(spec: RuntimeSpec) -> PackedRuntime | None:
    if not packed_runtime.suits(spec.folder, device=spec.device, dtype=spec.dtype):
        return None
    try:
        return timed_runtime.load(
            spec.folder, spec.max_length, device=spec.device, dtype=spec.dtype, threads=spec.threads
        )
    except CannotCompileError:
        return None


def find_steps(lengths: Sequence[int], rounds: np.ndarray) -> tuple[int, ...]:
    """The last lengths before each jump of a staircase; none if latency is smooth or flat.

    `rounds` are two or more measurements, one a row, of the seconds at each length. What jumps in only one half of them
    is noise, and a curve that owes less than half of its rise to jumps is no staircase.
    """
    if len(lengths) <= 2 * _PLATEAU:
        return ()
    jumps = sorted(_jumps(rounds[::2].min(axis=0)) & _jumps(rounds[1::2].min(axis=0)))
    curve = rounds.min(axis=0)
    if np.diff(curve)[jumps].sum() < _STAIRCASE * np.ptp(curve):
        return ()
    return tuple(lengths[index] for index in jumps)


def _jumps(seconds: np.ndarray) -> set[int]:
    """The places of the last measurements before a jump: a rise that is sudden and stays."""
    found = set()
    for index in range(len(seconds) - 1):
        before = seconds[max(0, index + 1 - _PLATEAU) : index + 1]
        after = seconds[index + 1 : index + 1 + _PLATEAU]
        stays = np.median(after) - np.median(before) >= _JUMP * np.median(before)
        if stays and after[0] - before[-1] >= _SUDDEN * (after.max() - before.min()):
            found.add(index)
    return found


def _grid(longest: int) -> tuple[int, ...]:
    """The lengths to measure: multiples of one step, and `longest`."""
    step = -(-longest // (_FINEST * _MOST_LENGTHS)) * _FINEST
    return (*range(step, longest, step), longest)


def _deciding(lengths: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The lengths at which static runtimes are worth compiling, at most EVEN_BINS, the shortest and longest first."""
    edges = sorted({*steps, lengths[-1]}) if steps else lengths
    picks = np.linspace(0, len(edges), EVEN_BINS + 1)[1:] - 1
    rising = sorted({edges[max(0, round(pick))] for pick in picks})
    return list(dict.fromkeys([rising[0], rising[-1], *rising]))


def _rounds(
    calls: "Sequence[tuple[Runtime | PackedRuntime, int]]",
    budget_s: float,
    report: Callable[[float], object] = lambda _done: None,
) -> np.ndarray:
    """The seconds of each call of a runtime with so many tokens, in as many rounds, one a row, as `budget_s` allows.

    Each call comes once in a round, so that a slow moment of the machine falls on all alike.
    """
    texts = [np.ones(length, dtype=np.int64) for _, length in calls]
    fewest, most = _ROUNDS
    rounds: list[list[float]] = []
    begun = time.perf_counter()
    while len(rounds) < most:
        rounds.append([])
        for (runtime, _), text in zip(calls, texts, strict=True):
            start = time.perf_counter()
            runtime(text)
            rounds[-1].append(time.perf_counter() - start)
        spent = (time.perf_counter() - begun) / budget_s
        if len(rounds) >= fewest and spent >= 1:
            break
        report(min(1.0, max(spent, len(rounds) / most)))
    return np.array(rounds)


def _main() -> None:
    work_in_background(niceness=0)
    given = json.loads(sys.argv[1])
    try:
        spec = RuntimeSpec(**{**given["spec"], "folder": Path(given["spec"]["folder"])})
        found = measure_profile(spec, lambda _text, _done: None, given["static"])
    except PliantError as error:
        sys.exit(str(error))
    print(found.model_dump_json())


if __name__ == "__main__":
    _main()
