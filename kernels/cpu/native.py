"""What kernels in C share on a CPU: how they are compiled, the pool of threads, and packed weights.

A packed weight serves every number of rows (cpu_linear.c), so that it is kept once.
"""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pliant.kernels import c_compiler
from pliant.kernels.huge_pages import Arena

SOURCES = [Path(__file__).with_name(f"cpu_{name}.c") for name in ("linear", "pool")]
OPTIONS = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
"""Let the compiler order sums as it likes; what is infinite or not a number stays so."""
PANEL = 16
"""Outputs that lie together in a packed weight."""


def library(sources: Sequence[Path], options: Sequence[str] = c_compiler.THIS_MACHINE) -> ctypes.CDLL:
    """The C `sources` with what they share, as one loaded library; `options` tell the compiler for which CPU.

    Raises `CompilerError` if they cannot be compiled.
    """
    return c_compiler.library([*sources, *SOURCES], (*options, *OPTIONS))


def start_pool(loaded: ctypes.CDLL, threads: int, owner: object) -> int:
    """The address of a pool (cpu_pool.c) of `threads` threads, the calling one among them, that ends with `owner`."""
    loaded.pliant_start_pool.restype = ctypes.c_void_p
    loaded.pliant_stop_pool.argtypes = [ctypes.c_void_p]
    pool: int = loaded.pliant_start_pool(threads)
    weakref.finalize(owner, loaded.pliant_stop_pool, pool).atexit = False
    return pool


def pack(loaded: ctypes.CDLL, pool: int, weight: np.ndarray, arena: Arena) -> np.ndarray:
    """`weight` [outs, ins] in panels, [panels, inputs / n, 16, n], with as many inputs side by side as four bytes hold:
    float32, the bits of bfloat16 (cpu_linear.c), or bytes (cpu_int8.c). The threads of `pool` share the work."""
    together = 4 // weight.itemsize
    outs, ins = weight.shape
    missing = -outs % PANEL, -ins % 32 if together > 1 else 0
    if any(missing):
        weight = np.pad(weight, [(0, each) for each in missing])
    weight = np.ascontiguousarray(weight)
    panels, steps = len(weight) // PANEL, weight.shape[1] // together
    packed = arena.zeros([panels, steps, PANEL, together], weight.dtype)
    loaded.pliant_pack.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
    loaded.pliant_pack(pool, weight.ctypes.data, packed.ctypes.data, panels, steps)
    return packed
