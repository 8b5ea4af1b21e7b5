"""The decoder's kernels on a CPU, in C: weights packed once, all tokens of a pass in few passes over memory.

A decode step reads every weight once, so it is as fast as memory allows up to the number of rows whose arithmetic
takes longer than that; the packed layout (cpu_linear.c, cpu_int8.c) serves every number of rows, so that a weight is
kept once.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pliant.kernels import c_compiler
from pliant.kernels.cpu import native
from pliant.kernels.cpu.native import PANEL
from pliant.kernels.decoder.int8 import quantized
from pliant.kernels.decoder.kernels import AddLora, DecoderKernels, Linear, Norms, Rotation, TorchKernels
from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.ragged import Ragged
from pliant.kernels.huge_pages import Arena

_NAMES = ("kernels", "lora", "lora_packed", "attention", "int8")
SOURCES = [Path(__file__).with_name(f"cpu_{name}.c") for name in _NAMES]
LARGEST_HEAD = 256  # as in cpu_kernels.h
_TILED, _SHARING = 128, 64  # queries of a tile, and that share a key at most; as in cpu_attention.c
KEPT_ROWS = 64  # up to which results go to buffers that are kept: a decode step's, not a prompt's

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "linear": [_POINTER] * 4 + [_LONG] * 3,
    "int8_linear": [_POINTER] * 5 + [_LONG] * 3,
    "lora": [_POINTER] * 7 + [_LONG] * 4,
    "add_norm": [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT],
    "gate": [_POINTER] * 2 + [_LONG] * 2,
    "rotate_and_store": [_POINTER] * 7 + [_FLOAT] + [_POINTER] * 3 + [_LONG] * 6,
    "attention": [_POINTER] * 6 + [_LONG] * 8,
    "move": [_POINTER] * 3 + [_LONG] * 6,
}
_warn_once = functools.cache(logging.getLogger("pliant").warning)


class CpuKernels(TorchKernels):
    """`DecoderKernels` for float32 and bfloat16, on the calling thread and `threads` - 1 of their own (cpu_pool.c).

    One call at a time. Heads whose size is no multiple of 16, or above 256, attend as `TorchKernels` do. Raises
    `CompilerError` if the C code cannot be compiled; `options` tell the compiler for which CPU.
    """

    def __init__(self, threads: int, options: Sequence[str] = c_compiler.THIS_MACHINE) -> None:
        library = self._library = native.library(SOURCES, options)
        self._pool = native.start_pool(library, threads, self)
        self._calls = {name: getattr(library, f"pliant_{name}") for name in _ARGUMENTS}
        for name, arguments in _ARGUMENTS.items():
            self._calls[name].argtypes = [_POINTER, ctypes.c_bool, *arguments]
            self._calls[name].restype = None
        self.arena = Arena()
        """Where weights lie."""
        self._results: dict[tuple[str, int, torch.dtype], _Result] = {}

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `DecoderKernels.linear`; the packed weight is all that is kept. Raises `ValueError` for another dtype."""
        _check(weight)
        bits = weight if weight.dtype is torch.float32 else weight.view(torch.int16)
        wide_bias = None if bias is None else bias.float().contiguous()
        return _PackedLinear(self, "linear", weight, self.pack(bits.detach().numpy()), wide_bias)

    def int8_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `DecoderKernels.int8_linear`, and `linear`."""
        _check(weight)
        values, scale = quantized(weight)
        wide_bias = torch.zeros_like(scale) if bias is None else bias.float()
        padded = (functional.pad(each, (0, -len(each) % PANEL)) for each in (scale, wide_bias))
        return _PackedLinear(self, "int8_linear", weight, self.pack(values.numpy().view(np.uint8) ^ 128), *padded)

    def lora(self, batch: LoraBatch) -> AddLora:
        """See `DecoderKernels.lora`; matrices of an odd number of inputs are multiplied as `TorchKernels` do."""
        if any(site.inputs % 2 for site in batch.sites.values()):
            return super().lora(batch)
        return _AddLora(self, batch)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, width = hidden.shape
        out, address = self._result("add_norm", rows, width, hidden.dtype)
        added = None if delta is None else delta.data_ptr()
        self.call("add_norm", hidden.dtype, hidden.data_ptr(), added, weight.data_ptr(), address, rows, width, eps)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out, address = self._result("gate", rows, width // 2, gate_up.dtype)
        self.call("gate", gate_up.dtype, gate_up.data_ptr(), address, rows, width // 2)
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        pages: Tensor,
        rotation: Rotation,
        norms: Norms | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        _, kv_heads, page, head_dim = keys.shape
        if head_dim > LARGEST_HEAD:
            return super().rotate_and_store(qkv, positions, pages, rotation, norms, eps, keys, values)
        rows, width = qkv.shape
        heads = width // head_dim - 2 * kv_heads
        out, address = self._result("rotate_and_store", rows, heads * head_dim, qkv.dtype)
        inputs = [tensor.data_ptr() for tensor in (qkv, positions, pages, *rotation)]
        weights = [norm.data_ptr() for norm in norms] if norms else [None, None]
        buffers = keys.data_ptr(), values.data_ptr(), address
        sizes = rows, heads, kv_heads, page, head_dim, keys.stride(0)
        self.call("rotate_and_store", qkv.dtype, *inputs, *weights, eps, *buffers, *sizes)
        return out.view(rows, heads, head_dim)

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        tokens, heads, head_dim = q.shape
        _, kv_heads, page, _ = keys.shape
        group = heads // kv_heads
        if head_dim > LARGEST_HEAD or head_dim % PANEL or group > _SHARING:
            return super().attention(q, keys, values, batch, window)
        out, address = self._result("attention", tokens, heads * head_dim, q.dtype)
        tiles = batch.tiles(_TILED // group)
        texts = keys.data_ptr(), values.data_ptr(), batch.tables.data_ptr(), tiles.ctypes.data
        sizes = len(tiles), batch.tables.shape[1], heads, kv_heads, page, head_dim, keys.stride(0), window or 0
        self.call("attention", q.dtype, q.data_ptr(), *texts, address, *sizes)
        return out

    def move(self, keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        layers, _, kv_heads, page, head_dim = keys.shape
        flat = [number for source, target, tokens in moves for number in (source, target, tokens * head_dim)]
        places = (_LONG * len(flat))(*flat)
        sizes = len(moves), layers, kv_heads, *keys.stride()[:2], page * head_dim
        self.call("move", keys.dtype, keys.data_ptr(), values.data_ptr(), places, *sizes)

    def call(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        """Run `pliant_<name>` of the C sources."""
        self._calls[name](self._pool, dtype is torch.bfloat16, *arguments)

    def pack(self, weight: np.ndarray) -> np.ndarray:
        """See `native.pack`."""
        return native.pack(self._library, self._pool, weight, self.arena)

    def _result(self, name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        key = name, width, dtype
        if key not in self._results:
            self._results[key] = _Result(width, dtype)
        return self._results[key](rows)


class _Result:
    """Where an operation's results go: to a buffer that is kept, if they are a decode step's, or else a new tensor."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._new = functools.partial(torch.empty, dtype=dtype)
        self._width = width
        self._kept: list[tuple[Tensor, int]] = []

    def __call__(self, rows: int) -> tuple[Tensor, int]:
        """[rows, width], and its address."""
        if rows > KEPT_ROWS:
            new: Tensor = self._new(rows, self._width)
            return new, new.data_ptr()
        if not self._kept:
            whole: Tensor = self._new(KEPT_ROWS, self._width)
            self._kept = [(whole[:count], whole.data_ptr()) for count in range(KEPT_ROWS + 1)]
        return self._kept[rows]


def _check(weight: Tensor) -> None:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the CPU kernels compute in float32 or bfloat16; a weight is {weight.dtype}")


class _PackedLinear:
    """`weight` packed for `pliant_<name>`, [panels, steps, `PANEL` outputs, inputs of a step], and the other
    `parameters` that it takes."""

    def __init__(
        self, kernels: CpuKernels, name: str, weight: Tensor, packed: np.ndarray, *parameters: Tensor | None
    ) -> None:
        self._kernels = kernels
        self._name = name
        self._outs, ins = weight.shape
        self._ins = packed.shape[1] * packed.shape[3]
        self._padding = self._ins - ins
        self._kept = packed, parameters
        self._addresses = packed.ctypes.data, *(None if each is None else each.data_ptr() for each in parameters)
        self._result = _Result(self._outs, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._padding:
            x = functional.pad(x, (0, self._padding))
        x, rows = x.contiguous(), x.shape[0]
        out, address = self._result(rows)
        sizes = rows, self._ins, self._outs
        self._kernels.call(self._name, x.dtype, x.data_ptr(), *self._addresses, address, *sizes)
        return out


class _AddLora:
    """Adds the adapters of a batch by cpu_lora.c."""

    def __init__(self, kernels: CpuKernels, batch: LoraBatch) -> None:
        self._kernels = kernels
        self._batch = batch  # whose tables stay where they are as long as it does
        self._tables = [table.ctypes.data for table in (batch.rows, batch.starts, batch.places, batch.outs)]
        self._sites = {name: (at, site.inputs) for at, (name, site) in enumerate(batch.sites.items())}

    def __call__(self, y: Tensor, x: Tensor, layer: int, site: str) -> None:
        at, inputs = self._sites[site]
        x = x.contiguous()
        addresses = self._batch.arena.data_ptr(), x.data_ptr(), y.data_ptr(), *self._tables
        self._kernels.call("lora", y.dtype, *addresses, len(self._batch.groups), layer, at, inputs)


def best(threads: int) -> DecoderKernels:
    """`CpuKernels` on `threads` threads, or `TorchKernels`, with one warning, where they cannot be compiled."""
    try:
        return CpuKernels(threads)
    except c_compiler.CompilerError as reason:
        _warn_once("Language models run on slower kernels: %s.", str(reason))
    return TorchKernels()
