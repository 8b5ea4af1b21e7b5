"""An encoder on a CPU, in C: one call for all texts of a pass, which lie one behind the other without padding.

Linear layers take most of the time. Texts are packed, so that they have many rows, and weights are packed once for any
number of rows: one copy of the weights serves every length and every batch, and nothing is compiled for either. It
imports no torch.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pliant.kernels import c_compiler
from pliant.kernels.cpu import native
from pliant.kernels.encoder.exits import Batch, Exits, Left
from pliant.kernels.encoder.weights import EncoderWeights
from pliant.kernels.huge_pages import Arena
from pliant.models.encoder_head import Stage
from pliant.models.encoder_shape import EncoderShape

SOURCE = Path(__file__).with_name("cpu_encoder.c")
HEAD_DIM = 16
"""Heads must have a multiple of so many numbers."""

_ACTIVATIONS = ("none", "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "mish", "sigmoid")
"""In the order of cpu_encoder.c."""
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_LINE = 16
"""Floats of a cache line."""


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


class _Exit(ctypes.Structure):
    _fields_ = (("after", _LONG), ("weight", _POINTER), ("bias", _POINTER))


class _Leaving(ctypes.Structure):
    _fields_ = (
        ("exits", _POINTER),
        ("count", _LONG),
        ("labels", _LONG),
        *((name, _POINTER) for name in ("temperatures", "sure_from", "said", "seconds", "layers")),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("ids", "places", "types", "starts")),
        ("texts", _LONG),
        ("firsts", ctypes.c_bool),
        *((name, _POINTER) for name in ("received", "leaving", "out")),
    )


class _HeadStage(ctypes.Structure):
    _fields_ = (("linear", _Dense), ("norm", _Norm), ("activation", ctypes.c_int32), ("eps", ctypes.c_float))


def compile_ahead(options: Sequence[str] = c_compiler.THIS_MACHINE) -> None:
    """Have the C code compiled, which needs no model. Raises `CompilerError` if it cannot be."""
    native.library([SOURCE], options)


class CpuEncoder:
    """What the model of these weights computes of packed texts in float32, on `threads` threads.

    Linear layers are packed; the other weights stay where they were read. One call at a time. Raises `CompilerError` if
    the C code cannot be compiled, and ValueError for a model that it does not take.
    """

    def __init__(self, weights: EncoderWeights, threads: int, options: Sequence[str] = c_compiler.THIS_MACHINE) -> None:
        shape = weights.shape
        if not self.takes(shape):
            raise ValueError(f"{shape.hidden // shape.heads} numbers a head: not supported")
        library = native.library([SOURCE], options)
        self._workspace_of = library.pliant_encoder_workspace
        self._workspace_of.argtypes, self._workspace_of.restype = [_POINTER, _LONG, _LONG], _LONG
        self._encode = library.pliant_encode
        self._encode.argtypes, self._encode.restype = [_POINTER] * 4, None
        self._apply_stage = library.pliant_apply_stage
        self._apply_stage.argtypes, self._apply_stage.restype = [_POINTER] * 4 + [_LONG], None
        self._library = library
        self._pool = native.start_pool(library, threads, self)
        self._shape, self._head = shape, weights.head
        self._tensors = weights.tensors
        self._kept: list[object] = []
        """What the structures below point to."""
        self._turns: dict[float, tuple[int, ...]] = {}
        self._arena = Arena()
        self._encoder = self._encoder_of(weights)
        self._stages = [self._stage(index, stage) for index, stage in enumerate(weights.head.stages)]
        del self._tensors
        self._workspace = np.empty(0, np.float32)

    @staticmethod
    def takes(shape: EncoderShape) -> bool:
        """Whether this can compute a model of that shape."""
        return shape.hidden // shape.heads % HEAD_DIM == 0

    def __call__(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], *, importance: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """float32 [texts, outputs] of `ids`, int64 [tokens], or [tokens, outputs] if each token has its answer.

        `types`, int64 [tokens], tell the two texts of a pair apart (None: all 0), and `lengths` are those of texts.
        With `importance` that of each token comes with it, [tokens] (see `importance.received`).
        """
        received = np.zeros((self._shape.heads, len(ids)), np.float32) if importance else None
        starts = _starts(lengths)
        found = self._answers(self._run(ids, types, starts, received), starts)
        return found, None if received is None else received.sum(0)

    @property
    def layers(self) -> int:
        """How many there are."""
        return self._shape.layers

    @property
    def hidden(self) -> int:
        """Numbers of a token's state."""
        return self._shape.hidden

    def exits(self, exits: Exits) -> "_CpuExits":
        """See `exits.LayeredEncoder`."""
        return _CpuExits(self, exits)

    @property
    def _reads_firsts(self) -> bool:
        return self._head.pooling == ("cls",)

    def _run(
        self,
        ids: np.ndarray,
        types: np.ndarray | None,
        starts: np.ndarray,
        received: np.ndarray | None = None,
        leaving: _Leaving | None = None,
    ) -> np.ndarray:
        """float32 [tokens, hidden] behind all layers, or [texts, hidden] for a head that reads first tokens; adds to
        `received`. The first are of the texts that were not `leaving`, and no others mean anything.
        """
        tokens, texts = int(starts[-1]), len(starts) - 1
        states = np.empty((texts if self._reads_firsts else tokens, self._shape.hidden), np.float32)
        places = self._places(ids, starts)
        given = _Pass(
            ids.ctypes.data,
            None if places is None else places.ctypes.data,
            None if types is None else types.ctypes.data,
            starts.ctypes.data,
            texts,
            self._reads_firsts,
            None if received is None else received.ctypes.data,
            None if leaving is None else ctypes.addressof(leaving),
            states.ctypes.data,
        )
        needed = self._workspace_of(ctypes.byref(self._encoder), tokens, texts)
        if needed > len(self._workspace):
            self._workspace = _aligned(needed)
        self._encode(self._pool, ctypes.byref(self._encoder), ctypes.byref(given), self._workspace.ctypes.data)
        return states

    def _whole(self, states: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """What the head makes of the first of the states, which are those of texts of these lengths."""
        starts = _starts(lengths)
        return self._answers(states[: len(lengths) if self._reads_firsts else int(starts[-1])], starts)

    def _answers(self, states: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """What the head makes of the states behind the last layer: see `__call__`."""
        if not self._reads_firsts and self._head.pooling:
            states = np.concatenate([_pooled(states, starts, how) for how in self._head.pooling], 1)
        for stage in self._stages:
            read, states = states, np.empty((len(states), stage.linear.outs), np.float32)
            self._apply_stage(self._pool, ctypes.byref(stage), read.ctypes.data, states.ctypes.data, len(states))
        if self._head.normalized:
            states /= np.linalg.norm(states, axis=1, keepdims=True).clip(1e-12)
        return states

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

    def _encoder_of(self, weights: EncoderWeights) -> _Encoder:
        shape = weights.shape
        layers = (_Layer * shape.layers)(*(self._layer(depth) for depth in range(shape.layers)))
        self._kept.append(layers)
        return _Encoder(
            **{name: self._address(f"encoder.{name}") for name in ("words", "positions", "types", "distances", "rows")},
            layers=ctypes.addressof(layers),
            norm=self._norm("encoder.norm"),
            last_norm=self._norm("encoder.last_norm"),
            projection=self._dense("encoder.projection"),
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

    def _layer(self, depth: int) -> _Layer:
        layer, rotary = f"encoder.layers.{depth}", self._shape.rotary
        parts: dict[str, Any] = {name: self._dense(f"{layer}.{name}") for name in ("qkv", "output", "up", "down")}
        parts |= {name: self._norm(f"{layer}.{name}") for name in ("attention_norm", "mlp_norm")}
        if rotary:
            local = rotary.local[depth]
            cosines, sines = self._turning(rotary.local_theta if local else rotary.theta)
            return _Layer(**parts, cosines=cosines, sines=sines, window=rotary.window if local else -1)
        for name in ("far_keys", "far_queries"):
            far = self._tensors.get(f"{layer}.{name}")
            if far is not None:
                padding = _far(far.shape[2] // 2) - far.shape[2]
                parts[name] = self._keep(np.pad(far, [(0, 0), (0, 0), (0, padding)]))
        return _Layer(**parts, window=-1)

    def _turning(self, theta: float) -> tuple[int, ...]:
        """The cosines and sines of every position, [positions, head_dim / 2] each."""
        if theta not in self._turns:
            size = self._shape.hidden // self._shape.heads
            steps = 1 / theta ** (np.arange(0, size, 2, dtype=np.float32) / size)
            angles = np.arange(self._shape.max_length, dtype=np.float32)[:, None] * steps
            self._turns[theta] = self._keep(np.cos(angles)), self._keep(np.sin(angles))
        return self._turns[theta]

    def _stage(self, index: int, stage: Stage) -> _HeadStage:
        name = f"head.stages.{index}"
        activation = _ACTIVATIONS.index(stage.activation)
        return _HeadStage(self._dense(f"{name}.linear"), self._norm(f"{name}.norm"), activation, stage.norm_eps or 0.0)

    def _dense(self, name: str) -> _Dense:
        weight = self._tensors.get(f"{name}.weight")
        if weight is None:
            return _Dense()
        outs, ins = weight.shape
        packed = native.pack(self._library, self._pool, weight, self._arena)
        return _Dense(self._keep(packed), self._address(f"{name}.bias"), ins, outs)

    def _norm(self, name: str) -> _Norm:
        return _Norm(self._address(f"{name}.weight"), self._address(f"{name}.bias"))

    def _address(self, name: str) -> int | None:
        """Where the tensor of that name lies for as long as this lives; None if the model has none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else self._keep(tensor)

    def _keep(self, array: np.ndarray) -> int:
        self._kept.append(array)
        return array.ctypes.data


class _CpuExits:
    """The exits of a `CpuEncoder`: an `exits.Leave`."""

    def __init__(self, encoder: CpuEncoder, exits: Exits) -> None:
        self._encoder = encoder
        self._weights, self._biases = (np.ascontiguousarray(each, np.float32) for each in (exits.weights, exits.biases))
        rows = zip(exits.after, self._weights, self._biases, strict=True)
        self._exits = (_Exit * len(exits.after))(
            *(_Exit(after, weight.ctypes.data, bias.ctypes.data) for after, weight, bias in rows)
        )

    def __call__(self, batch: Batch) -> Left:
        exits, labels = self._biases.shape
        lengths = batch.lengths
        said = np.empty((exits, len(lengths), labels), np.float32)
        seconds, layers = np.empty(exits), np.empty(len(lengths), np.int64)
        arrays = (batch.temperatures, batch.sure_from, said, seconds, layers)
        leaving = _Leaving(ctypes.addressof(self._exits), exits, labels, *(array.ctypes.data for array in arrays))
        states = self._encoder._run(batch.ids, batch.types, _starts(lengths), leaving=leaving)
        depths = layers.tolist()
        staying = [length for length, depth in zip(lengths, depths, strict=True) if depth == self._encoder.layers]
        return Left(said, seconds.tolist(), depths, self._encoder._whole(states, staying) if staying else ())


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [texts + 1]: the first token of each text, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _far(buckets: int) -> int:
    """How long a row of what stands for distances is: a multiple of what is loaded at a time."""
    return -(-2 * buckets // 16) * 16


def _aligned(count: int) -> np.ndarray:
    """So many floats, from the start of a cache line on."""
    whole = np.empty(count + _LINE, np.float32)
    return whole[-whole.ctypes.data // whole.itemsize % _LINE :][:count]


def _pooled(states: np.ndarray, starts: np.ndarray, how: str) -> np.ndarray:
    """[texts, hidden] of [tokens, hidden], by one of `encoder_head.POOLINGS`."""
    firsts, lengths = starts[:-1], np.diff(starts)
    found: np.ndarray
    if how in ("cls", "lasttoken"):
        found = states[firsts if how == "cls" else starts[1:] - 1]
        return found
    if how == "max":
        found = np.maximum.reduceat(states, firsts)
        return found
    weights = np.ones(len(states), np.float32)
    if how == "weightedmean":
        weights += np.arange(len(states)) - np.repeat(firsts, lengths)
    total = np.add.reduceat(states * weights[:, None], firsts)
    count = np.add.reduceat(weights, firsts)[:, None]
    found = total / (np.sqrt(count) if how == "mean_sqrt_len_tokens" else count)
    return found
