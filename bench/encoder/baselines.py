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
from pliant.kernels.encoder import compiled_classifier
from pliant.kernels.encoder.transformers_classifier import TransformersClassifier
from pliant.kernels.runtime_cache import RuntimeSpec
from pliant.models import sources


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


class _AsItComes(torch.nn.Module):
    """transformers' model for token ids above their mask, int64 (2, length)."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__()
        self.classifier = TransformersClassifier(folder, device=device, dtype=torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classifier.padded(inputs[:1], inputs[1:])
        return found[0]


class _OnnxRuntime:
    """One ONNX Runtime session on one thread."""

    backend = "onnxruntime"
    dynamic = True

    def __init__(self, path: Path, providers: list[str], max_length: int) -> None:
        self.max_length = max_length
        options = onnxruntime.SessionOptions()  # type: ignore[attr-defined]
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(path, options, providers=providers)  # type: ignore[attr-defined]

    def __call__(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        inputs = np.stack([np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=np.int64)])
        logits: np.ndarray = self._session.run(None, {"inputs": inputs})[0]
        return logits


def export(folder: Path, longest: int) -> Path:
    """The ONNX file of the classifier in `folder` for up to `longest` tokens, kept in the user's cache."""

    def build(made: Path) -> None:
        program = torch.onnx.export(
            _AsItComes(folder, "cpu"),
            (torch.ones(2, longest // 2, dtype=torch.int64),),
            dynamo=True,
            dynamic_shapes=({1: torch.export.Dim("length", min=2, max=longest)},),
            input_names=["inputs"],
            verbose=False,
        )
        assert program
        program.save(made / "model.onnx")

    return made_once(cache_folder() / "onnx" / RuntimeSpec(folder, longest).name(), build) / "model.onnx"


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
