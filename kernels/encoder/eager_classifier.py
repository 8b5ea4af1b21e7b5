"""An uncompiled sequence classifier: what runtimes are compiled from and compared with, and what stands in for them."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from pliant.kernels.encoder import weights as encoder_weights
from pliant.kernels.encoder.model import EncoderClassifier
from pliant.models.decoder_info import read_json
from pliant.models.encoder_shape import EncoderShape

if TYPE_CHECKING:
    from pliant.kernels.encoder.transformers_classifier import TransformersClassifier


class Facts(TypedDict):
    """What a runtime must know to pad and check token ids: the pad token and the size of the vocabulary."""

    pad: int
    vocabulary: int


class EagerClassifier(torch.nn.Module):
    """The classifier in `folder`, with one tensor in and one out; transformers is imported only where `EncoderShape`
    does not know the model.

    `forward` takes int64 (2, length), token ids above the attention mask, and returns float32 (labels,), or float32
    (labels + length,) if it is to give the `importance` of each token too (see `importance.received`).
    Raises `ModelError` if `folder` holds no sequence classifier, or one whose attention weights cannot be had.
    """

    def __init__(self, folder: Path, *, device: str, dtype: str, importance: bool = False) -> None:
        super().__init__()
        self.importance = importance
        self.model = _load(folder, device, getattr(torch, dtype), importance)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.model(inputs[:1], inputs[1:])
        return found[0]

    @torch.inference_mode()
    def unpadded(self, ids: Tensor) -> Tensor:
        """What `forward` returns of int64 (length,) token ids without padding, sooner."""
        found: Tensor = self.model(ids[None])
        return found[0]

    @property
    def facts(self) -> Facts:
        return {"pad": self.model.pad, "vocabulary": self.model.vocabulary}


def _load(
    folder: Path, device: str, dtype: torch.dtype, importance: bool
) -> "EncoderClassifier | TransformersClassifier":
    if shape := EncoderShape.from_config(read_json(folder / "config.json")):
        return encoder_weights.load(folder, shape, device=device, dtype=dtype, importance=importance)
    from pliant.kernels.encoder.transformers_classifier import TransformersClassifier

    return TransformersClassifier(folder, device=device, dtype=dtype, importance=importance)
