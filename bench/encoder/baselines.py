"""What a user would serve a classifier with instead: the model at each text's exact length, uncompiled or exported.

Each is a replica of ours around another runtime, so that the same gateway, router and pool stand before all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from pliant.bench.loaded import Loaded
from pliant.cache import cache_folder, made_once
from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.engine import Runtimes
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.kernels.encoder import compiled_classifier, pass_times
from pliant.kernels.encoder.texts import Output, Text
from pliant.kernels.encoder.transformers_classifier import TransformersClassifier
from pliant.kernels.runtime_cache import RuntimeSpec
from pliant.models import sources

BATCH = 32
_MEASURED_S = 3.0


class EagerReplica(EncoderReplica):
    """Runs transformers' model as it comes, without padding."""

    def runtimes(self, config: EncoderConfig) -> Runtimes:
        return Loaded(config, partial(_eager, sources.fetch(config.model), config.device))


class OnnxReplica(EncoderReplica):
    """Runs ONNX Runtime on a model exported with a dynamic length, without padding."""

    def runtimes(self, config: EncoderConfig) -> Runtimes:
        assert config.lengths
        path = export(sources.fetch(config.model), config.lengths[-1])
        return Loaded(config, partial(_OnnxRuntime, path, _providers(config.device)))


class BatchedOnnxReplica(EncoderReplica):
    """The same, and computes texts that wait together, padded to the longest of them.

    They are cut into batches as ours are, by what its own batches take.
    """

    def runtimes(self, config: EncoderConfig) -> Runtimes:
        assert config.lengths
        path = export(sources.fetch(config.model), config.lengths[-1], BATCH)
        return Loaded(config, partial(_BatchedOnnxRuntime, path, _providers(config.device)))


class _AsItComes(torch.nn.Module):
    """transformers' model for token ids above their mask, int64 (2, length) of one text, or (2, texts, length)."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__()
        self.classifier = TransformersClassifier(folder, device=device, dtype=torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.dim() == 3:
            several: torch.Tensor = self.classifier.padded(inputs[0], inputs[1])
            return several
        found: torch.Tensor = self.classifier.padded(inputs[:1], inputs[1:])
        return found[0]


class _OnnxRuntime:
    """One ONNX Runtime session on one thread."""

    backend = "onnxruntime"
    dynamic = True

    def __init__(self, path: Path, providers: list[str], max_length: int) -> None:
        self.max_length = max_length
        self._session = _session(path, providers)

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        inputs = np.stack([np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=np.int64)])
        logits: np.ndarray = self._session.run(None, {"inputs": inputs})[0]
        return logits


class _BatchedOnnxRuntime:
    """The same for several texts at a time."""

    backend = "onnxruntime"
    dynamic = True

    def __init__(self, path: Path, providers: list[str], max_length: int) -> None:
        self.max_length = max_length
        self._session = _session(path, providers)
        self.times = pass_times.measure(self, budget_s=_MEASURED_S)

    def __call__(self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        return self.run_all([Text(ids, types)])[0].logits

    def run_all(self, texts: Sequence[Text], *, importance: bool = False) -> list[Output]:
        lengths = [len(text.ids) for text in texts]
        inputs = np.zeros((2, len(texts), max(*lengths, 2)), np.int64)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            inputs[0, row, :length] = text.ids
            inputs[1, row, :length] = 1
        return [Output(logits, None) for logits in self._session.run(None, {"inputs": inputs})[0]]


def _session(path: Path, providers: list[str]) -> Any:
    options = onnxruntime.SessionOptions()  # type: ignore[attr-defined]
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=providers)  # type: ignore[attr-defined]


def export(folder: Path, longest: int, batch: int = 1) -> Path:
    """The ONNX file of the classifier in `folder` for up to `longest` tokens, kept in the user's cache."""
    length = torch.export.Dim("length", min=2, max=longest)
    example = torch.ones(2, longest // 2, dtype=torch.int64)
    shapes: dict[int, Any] = {1: length}
    if batch > 1:
        example = example[:, None].repeat(1, 2, 1)
        shapes = {1: torch.export.Dim("texts", min=1, max=batch), 2: length}

    def build(made: Path) -> None:
        program = torch.onnx.export(
            _AsItComes(folder, "cpu"),
            (example,),
            dynamo=True,
            dynamic_shapes=(shapes,),
            input_names=["inputs"],
            verbose=False,
        )
        assert program
        program.save(made / "model.onnx")

    return made_once(cache_folder() / "onnx" / RuntimeSpec(folder, longest, batch=batch).name(), build) / "model.onnx"


def onnxruntime_runs_on(device: str) -> bool:
    """Whether the installed ONNX Runtime computes on `device`, "cpu" or "cuda"."""
    return _providers(device)[0] in onnxruntime.get_available_providers()  # type: ignore[attr-defined]


def _providers(device: str) -> list[str]:
    return ["CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"]


def _eager(folder: Path, device: str, max_length: int) -> Runtime:
    torch.set_num_threads(1)
    model = _AsItComes(folder, device)

    @torch.inference_mode()
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(inputs[:, 0].to(device))
        return logits[None].cpu()

    pad, vocabulary = model.classifier.pad, model.classifier.vocabulary
    return compiled_classifier.Runtime(forward, "eager", max_length, pad=pad, vocabulary=vocabulary)
