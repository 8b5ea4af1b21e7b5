"""A packed runtime that knows what its passes take, so that texts can be cut into passes.

What there is to prepare is the C code, once per machine, and the table, once per shape of model: seconds, where a
compiled runtime takes minutes.
"""

import functools
from pathlib import Path
from typing import Any

from pliant.cache import cache_folder, made, made_once
from pliant.errors import CannotCompileError
from pliant.formats.pass_times import PassTimes
from pliant.kernels.encoder import exits as encoder_exits
from pliant.kernels.encoder import packed_runtime, pass_times
from pliant.kernels.encoder.packed_runtime import PackedRuntime
from pliant.kernels.runtime_cache import RuntimeSpec

RECIPE = 1
"""Raised whenever passes are measured in another way, so that older tables are left alone."""

_BUDGET_S = 5.0


def load(
    folder: Path,
    max_length: int,
    *,
    measuring: bool = True,
    exits: bool = False,
    unasked: bool = True,
    **options: Any,
) -> PackedRuntime:
    """The packed runtime of the encoder in `folder`, with what its passes take.

    Without `measuring`, passes that were not measured yet stay so. With `exits` texts leave early by those that the
    folder has, without `unasked` only where they say so; passes are measured through all layers. `options` are those
    of `packed_runtime.load`. Raises ModelError as that does, and `CannotCompileError` where texts cannot be computed
    together, or, on a CPU, would be by torch alone, unless they are to leave early: nothing else lets them.
    """
    runtime = _load(folder, max_length, exits, options)
    table = _table(folder, max_length, exits, options)
    if measuring or made(table):
        runtime.times = _times(runtime, table)
    if exits:
        runtime.leave_early(encoder_exits.load(folder), unasked=unasked)
    return runtime


def prepare(folder: Path, max_length: int, *, exits: bool = False, **options: Any) -> None:
    """Have what `load` with these arguments needs. Raises as it does."""
    table = _table(folder, max_length, exits, options)
    if not made(table):
        _times(_load(folder, max_length, exits, options), table)


def is_prepared(folder: Path, max_length: int, *, exits: bool = False, **options: Any) -> bool:
    """Whether `load` with these arguments has nothing to compile or measure."""
    return made(_table(folder, max_length, exits, options))


def _load(folder: Path, max_length: int, exits: bool, options: dict[str, Any]) -> PackedRuntime:
    runtime = packed_runtime.load(folder, max_length, **options)
    slow = options.get("device", "cpu") == "cpu" and runtime.backend != "c"
    if slow and not (exits and runtime.encoder):
        raise CannotCompileError(
            f"{folder} runs uncompiled, which takes two to four times as long for short texts: no C compiler was found "
            "that can compile our code. Install one (apt-get install gcc) and restart."
        )
    return runtime


def _table(folder: Path, max_length: int, exits: bool, options: dict[str, Any]) -> Path:
    spec = RuntimeSpec(folder, max_length, **options)
    in_torch = exits and not packed_runtime.suits(folder, device=spec.device, dtype=spec.dtype)
    return cache_folder() / "profiles" / (f"{spec.shape_name()}-passes-{RECIPE}" + "-torch" * in_torch)


def _times(runtime: PackedRuntime, table: Path) -> PassTimes:
    folder = made_once(table, functools.partial(_measure_into, runtime))
    return PassTimes.model_validate_json((folder / "passes.json").read_text())


def _measure_into(runtime: PackedRuntime, folder: Path) -> None:
    times = pass_times.measure(runtime, budget_s=_BUDGET_S)
    (folder / "passes.json").write_text(times.model_dump_json(indent=1))
