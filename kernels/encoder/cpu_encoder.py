"""An encoder on a CPU, in C: one call for all texts of a pass, which lie one behind the other without padding.

Linear layers take most of the time. Texts are packed, so that they have many rows, and weights are packed once for any
number of rows: one copy of the weights serves every length and every batch, and nothing is compiled for either.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module

from pliant.kernels import c_compiler
from pliant.kernels.cpu import native
from pliant.kernels.encoder.layout import Packed
from pliant.kernels.encoder.model import EncoderModel, RotaryLayer, turns
from pliant.kernels.huge_pages import Arena

SOURCE = Path(__file__).with_name("cpu_encoder.c")
HEAD_DIM = 16
"""Heads must have a multiple of so many numbers."""

_ACTIVATIONS = ("none", "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "mish")
"""In the order of cpu_encoder.c."""
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Dense(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("ins", _LONG), ("outs", _LONG))


class _Norm(ctypes.Structure):
    _fields_ = (("gain", _POINTER), ("shift", _POINTER))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Dense) for name in ("qkv", "output", "up", "down")),
        *((name, _Norm) for name in ("attention_norm", "mlp_norm")),
        *((name, _POINTER) for name in ("far_keys", "far_queries", "cosines", "sines")),
        ("window", _LONG),
    )


class _Encoder(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("words", "positions", "types", "distances", "rows", "layers")),
        ("norm", _Norm),
        ("last_norm", _Norm),
        ("projection", _Dense),
        *((name, _LONG) for name in ("depth", "hidden", "heads", "embedding", "intermediate", "reach", "far")),
        ("activation", ctypes.c_int32),
        ("norms_first", ctypes.c_bool),
        ("eps", ctypes.c_float),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("ids", "places", "types", "starts")),
        ("texts", _LONG),
        ("firsts", ctypes.c_bool),
        ("received", _POINTER),
        ("out", _POINTER),
    )


class CpuEncoder:
    """What `model`, which computes in float32 on a CPU, computes of packed texts, on `threads` threads.

    Takes over the model: its linear layers are packed, and their own weights are let go. One call at a time. Raises
    `CompilerError` if the C code cannot be compiled, and ValueError for a model whose heads have another number of
    dimensions than a multiple of `HEAD_DIM`, or that computes in another dtype.
    """

    def __init__(self, model: EncoderModel, threads: int, options: Sequence[str] = c_compiler.THIS_MACHINE) -> None:
        shape = model.shape
        if shape.hidden // shape.heads % HEAD_DIM or model.encoder.words.dtype is not torch.float32:
            raise ValueError(
                f"{shape.hidden // shape.heads} numbers a head, {model.encoder.words.dtype}: not supported"
            )
        library = native.library([SOURCE], options)
        self._workspace_of = library.pliant_encoder_workspace
        self._workspace_of.argtypes, self._workspace_of.restype = [_POINTER, _LONG, _LONG], _LONG
        self._encode = library.pliant_encode
        self._encode.argtypes, self._encode.restype = [_POINTER] * 4, None
        self._pool = native.start_pool(library, threads, self)
        self._shape, self._head = shape, model.head
        self._kept: list[object] = []
        """What the structures below point to."""
        self._turns: dict[float, tuple[int | None, ...]] = {}
        self._arena = Arena()
        self._encoder = self._encoder_of(model)
        self._workspace = torch.empty(0)

    @staticmethod
    def takes(model: EncoderModel) -> bool:
        """Whether this can compute what `model` does."""
        shape, words = model.shape, model.encoder.words
        return (
            shape.hidden // shape.heads % HEAD_DIM == 0 and words.dtype is torch.float32 and words.device.type == "cpu"
        )

    @torch.inference_mode()
    def __call__(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], *, importance: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """float32 [texts, outputs] of `ids`, int64 [tokens], or [tokens, outputs] if each token has its answer.

        `types`, int64 [tokens], are as `Encoder.forward` says, and `lengths` those of texts. With `importance` that of
        each token comes with it, [tokens] (see `importance.received`).
        """
        shape, firsts = self._shape, self._head.reads_firsts
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens, texts = int(starts[-1]), len(lengths)
        states = torch.empty(texts if firsts else tokens, shape.hidden)
        received = torch.zeros(shape.heads, tokens) if importance else None
        places = self._places(ids, starts)
        given = _Pass(
            ids.ctypes.data,
            None if places is None else places.ctypes.data,
            None if types is None else types.ctypes.data,
            starts.ctypes.data,
            texts,
            firsts,
            None if received is None else received.data_ptr(),
            states.data_ptr(),
        )
        needed = self._workspace_of(ctypes.byref(self._encoder), tokens, texts)
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed)
        self._encode(self._pool, ctypes.byref(self._encoder), ctypes.byref(given), self._workspace.data_ptr())
        if not firsts and self._head.shape.pooling:
            states = self._head.pooled(states, Packed(lengths, "cpu"))
        found: Tensor = self._head(states)
        return found, None if received is None else received.sum(0)

    def _places(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray | None:
        """Which embedding of a position each token has."""
        shape = self._shape
        if not shape.adds_positions:
            return None
        texts = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        if not shape.counts_tokens:
            return np.concatenate([np.arange(end - start) for start, end in texts])
        counted = ids != shape.pad
        places: np.ndarray = np.concatenate([counted[start:end].cumsum() for start, end in texts]) * counted + shape.pad
        return places

    def _encoder_of(self, model: EncoderModel) -> _Encoder:
        shape, encoder = self._shape, model.encoder
        layers = (_Layer * shape.layers)(*(self._layer(layer) for layer in encoder.layers))
        self._kept.append(layers)
        return _Encoder(
            words=self._address(encoder.words),
            positions=self._address(encoder.positions),
            types=self._address(encoder.types),
            distances=self._address(encoder.distances),
            rows=self._address(cast(Tensor | None, encoder.rows)),
            layers=ctypes.addressof(layers),
            norm=self._norm(encoder.norm),
            last_norm=self._norm(encoder.last_norm),
            projection=self._dense(encoder.projection),
            depth=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            embedding=shape.embedding,
            intermediate=shape.intermediate,
            reach=shape.max_length,
            far=_far(shape.disentangled.buckets) if shape.disentangled else 0,
            activation=_ACTIVATIONS.index(shape.activation),
            norms_first=shape.rotary is not None,
            eps=shape.norm_eps,
        )

    def _layer(self, layer: Module) -> _Layer:
        parts: dict[str, Any] = {name: self._dense(getattr(layer, name)) for name in ("qkv", "output", "up", "down")}
        parts |= {name: self._norm(getattr(layer, name)) for name in ("attention_norm", "mlp_norm")}
        if isinstance(layer, RotaryLayer):
            turning = self._turning(layer.local)
            window = -1 if layer.window is None else layer.window
            return _Layer(**parts, cosines=turning[0], sines=turning[1], window=window)
        for name in ("far_keys", "far_queries"):
            far = getattr(layer, name)
            if far is not None:
                padding = _far(far.shape[2] // 2) - far.shape[2]
                parts[name] = self._address(torch.nn.functional.pad(far, (0, padding)))
        return _Layer(**parts, window=-1)

    def _turning(self, local: bool) -> tuple[int | None, ...]:
        """The cosines and sines of every position, [positions, head_dim / 2] each."""
        rotary = self._shape.rotary
        assert rotary
        size = self._shape.hidden // self._shape.heads
        theta = rotary.local_theta if local else rotary.theta
        if theta not in self._turns:
            found = turns(torch.arange(self._shape.max_length), size, theta, torch.float32)
            self._turns[theta] = tuple(self._address(each) for each in found)
        return self._turns[theta]

    def _dense(self, linear: Linear | None) -> _Dense:
        if linear is None:
            return _Dense()
        bias = self._address(linear.bias)
        outs, ins = linear.weight.shape
        packed = native.pack(linear.weight, self._arena)
        linear.weight = None  # type: ignore[assignment]
        return _Dense(self._address(packed), bias, ins, outs)

    def _norm(self, norm: LayerNorm | None) -> _Norm:
        return _Norm() if norm is None else _Norm(self._address(norm.weight), self._address(norm.bias))

    def _address(self, tensor: Tensor | None) -> int | None:
        """Where its numbers lie for as long as this lives."""
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _far(buckets: int) -> int:
    """How long a row of what stands for distances is: a multiple of what is loaded at a time."""
    return -(-2 * buckets // 16) * 16
