"""What kernels in C share on a CPU: how they are compiled, the pool of threads, and packed weights.

A packed weight serves every number of rows (cpu_linear.c), so that it is kept once.
"""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

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


def pack(weight: Tensor, arena: Arena) -> Tensor:
    """`weight` [outs, ins] as cpu_linear.c describes, in float32 or bfloat16: [panels, inputs, 16, 1], or [panels,
    inputs / 2, 16, 2]."""
    pairs, padding = (2, -weight.shape[1] % 32) if weight.dtype is torch.bfloat16 else (1, 0)
    padded = functional.pad(weight, (0, padding, 0, -len(weight) % PANEL))
    panels = padded.view(-1, PANEL, padded.shape[1] // pairs, pairs).transpose(1, 2)
    return arena.zeros(panels.shape, weight.dtype).copy_(panels)
