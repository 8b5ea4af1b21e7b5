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
    """`weight` [outs, ins] as cpu_linear.c describes, in float32 or, of two bytes, the bits of bfloat16: [panels,
    inputs, 16, 1], or [panels, inputs / 2, 16, 2]. The threads of `pool` share the work."""
    pairs = 4 // weight.itemsize
    outs, ins = weight.shape
    missing = -outs % PANEL, -ins % 32 if pairs == 2 else 0
    if any(missing):
        weight = np.pad(weight, [(0, each) for each in missing])
    weight = np.ascontiguousarray(weight)
    panels, steps = len(weight) // PANEL, weight.shape[1] // pairs
    packed = arena.zeros([panels, steps, PANEL, pairs], weight.dtype)
    loaded.pliant_pack.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
    loaded.pliant_pack(pool, weight.ctypes.data, packed.ctypes.data, panels, steps)
    return packed


def pack_int8(weight: np.ndarray, arena: Arena) -> np.ndarray:
    """`weight` [outs, ins] of int8 as cpu_linear.c describes, [panels, inputs, 16, 1]."""
    outs, ins = weight.shape
    weight = np.pad(weight, [(0, -outs % PANEL), (0, -ins % 32)])
    panels, steps = len(weight) // PANEL, weight.shape[1]
    packed = arena.zeros([panels, steps, PANEL, 1], weight.dtype)
    packed[..., 0] = weight.reshape(panels, PANEL, steps).transpose(0, 2, 1)
    return packed
