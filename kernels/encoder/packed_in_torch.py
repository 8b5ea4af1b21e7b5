"""Packed runtimes of what the C code does not compute: GPUs, bfloat16, a machine without a compiler, other models."""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pliant.kernels import triton_cache
from pliant.kernels.encoder.eager_classifier import Model, load_model
from pliant.kernels.encoder.exits import Exits
from pliant.kernels.encoder.layer_by_layer import LayerByLayer
from pliant.kernels.encoder.layout import Packed
from pliant.kernels.encoder.model import EncoderModel
from pliant.kernels.encoder.packed_runtime import Encode, PackedRuntime
from pliant.kernels.encoder.texts import Accepted, Text
from pliant.kernels.upload import upload

if TYPE_CHECKING:
    from pliant.kernels.encoder.packed_graphs import PackedGraphs

_logger = logging.getLogger("pliant")


def load(folder: Path, max_length: int, device: str, dtype: str, threads: int) -> PackedRuntime:
    """See `packed_runtime.load`."""
    torch.set_num_threads(threads)
    if device == "cuda":
        triton_cache.keep()
    model = load_model(folder, device, getattr(torch, dtype))
    encode: Encode
    encoder = None
    if isinstance(model, EncoderModel):
        graphs = _graphs(model, max_length) if device == "cuda" else None
        encode, backend = functools.partial(_together, model, device, graphs), "cuda-graph" if graphs else "torch"
        encoder = TorchEncoder(model, device)
    else:
        encode, backend = functools.partial(_each_alone, model, device), "transformers"
    accepted = Accepted(max_length, model.vocabulary, model.token_types)
    runtime = PackedRuntime(encode, backend, accepted, labels_tokens=model.labels_tokens, encoder=encoder)
    if device == "cuda":
        _warm_up(runtime)
    return runtime


def _graphs(model: EncoderModel, max_length: int) -> "PackedGraphs | None":
    """None where passes cannot be recorded: they are launched kernel by kernel, which is slow for few tokens."""
    from pliant.kernels.encoder import packed_graphs  # wants Triton

    if not packed_graphs.records(model):
        return None
    try:
        return packed_graphs.PackedGraphs(model, torch.device("cuda"), max_length)
    except RuntimeError as reason:
        _logger.warning("An encoder cannot be recorded as CUDA graphs, and is slow on short texts: %s", reason)
        return None


def _warm_up(runtime: PackedRuntime) -> None:
    """Compute a short text and a long one, so that no request waits for a compiler: Triton has code for either."""
    for length in (1, runtime.max_length):
        runtime.run_all([Text(np.ones(length, np.int64))])


class TorchEncoder:
    """An `exits.LayeredEncoder`, in steps: states stay on the device, and what exits and the head say of them is copied
    here."""

    def __init__(self, model: EncoderModel, device: str) -> None:
        self._model, self._device = model, torch.device(device)
        self.layers, self.hidden = model.shape.layers, model.shape.hidden

    def exits(self, exits: Exits) -> LayerByLayer[Tensor]:
        return LayerByLayer(self, exits)

    def begin(self, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int]) -> "TorchPass":
        return TorchPass(self._model, self._device, ids, types, lengths)

    def exit(self, weight: np.ndarray, bias: np.ndarray) -> Callable[[Tensor], np.ndarray]:
        placed, shift = upload(weight.T.copy(), self._device), upload(bias, self._device)
        return lambda means: torch.addmm(shift, means, placed).cpu().numpy()


class TorchPass:
    """A `layer_by_layer.Pass`, in the model's dtype, but for what exits read and say, which is float32."""

    @torch.inference_mode()
    def __init__(
        self,
        model: EncoderModel,
        device: torch.device,
        ids: np.ndarray,
        types: np.ndarray | None,
        lengths: Sequence[int],
    ) -> None:
        self._model, self._device = model, device
        self._lengths = np.asarray(lengths)
        self._layout = Packed(lengths, device)
        given = None if types is None else upload(types, device)
        self._states = model.encoder.embedded(upload(ids, device), given, self._layout)
        self._done = 0

    @torch.inference_mode()
    def advance(self, end: int) -> None:
        layers = range(self._done, end)
        self._states = self._model.encoder.onward(self._states, self._layout, layers, self._model.head.reads_firsts)
        self._done = end

    @torch.inference_mode()
    def means(self) -> Tensor:
        return self._layout.pool(self._states, "mean")

    @torch.inference_mode()
    def keep(self, staying: np.ndarray) -> None:
        tokens = upload(np.flatnonzero(np.repeat(staying, self._lengths)), self._device)
        self._states = self._states[tokens]
        self._lengths = self._lengths[staying]
        self._layout = Packed(self._lengths.tolist(), self._device)

    @torch.inference_mode()
    def answers(self) -> np.ndarray:
        return self._model.answers(self._states, self._layout).cpu().numpy()


@torch.inference_mode()
def _together(
    model: EncoderModel,
    device: str,
    graphs: "PackedGraphs | None",
    ids: np.ndarray,
    types: np.ndarray | None,
    lengths: Sequence[int],
    importance: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    if importance:
        return _each_alone(model, device, ids, types, lengths, importance)
    if graphs and (recorded := graphs.run(ids, types, lengths)) is not None:
        return recorded, None
    given = None if types is None else torch.from_numpy(types).to(device)
    found: Tensor = model(torch.from_numpy(ids).to(device), given, Packed(lengths, device))
    return found.cpu().numpy(), None


@torch.inference_mode()
def _each_alone(
    model: Model, device: str, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], importance: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    answers: list[Tensor] = []
    received: list[Tensor] = []
    for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        one = slice(end - length, end)
        given = None if types is None else torch.from_numpy(types[one]).to(device)[None]
        found = model.padded(torch.from_numpy(ids[one]).to(device)[None], types=given, importance=importance)[0].cpu()
        if importance:
            found, weights = found[:-length], found[-length:]
            received.append(weights)
        answers.append(found)
    together = torch.cat(answers) if model.labels_tokens else torch.stack(answers)
    return together.numpy(), torch.cat(received).numpy() if importance else None
