"""An uncompiled encoder: what runtimes are compiled from and compared with, and what stands in for them."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Union

import torch
from torch import Tensor

from pliant.kernels import attention_choice
from pliant.kernels.encoder import weights
from pliant.kernels.encoder.model import EncoderModel
from pliant.models.decoder_info import read_json
from pliant.models.encoder_shape import EncoderShape

if TYPE_CHECKING:
    from pliant.kernels.encoder.transformers_classifier import TransformersClassifier

Model = Union[EncoderModel, "TransformersClassifier"]
"""Both have `padded`, and say what they must be given."""


class Facts(TypedDict):
    """What a runtime must know to lay out token ids and to check them."""

    pad: int
    vocabulary: int
    token_types: int
    """0 or 1 if it tells no first text of a pair from the second."""


class EagerClassifier(torch.nn.Module):
    """The encoder in `folder` with its head, with one tensor in and one out; transformers is imported only where
    `EncoderShape` does not know the model.

    `forward` takes int64 [rows, texts, width]: token ids, the mask that is 1 for them and 0 for padding, and token
    types if the model has any. It returns float32 [texts, outputs], [texts, width, outputs] if each token has its
    answer, or [texts, outputs + width] if it is to give the `importance` of each token too (see `importance.received`).
    Raises `ModelError` if `folder` holds no encoder for a task, or one whose attention weights cannot be had.
    """

    def __init__(self, folder: Path, *, device: str, dtype: str, importance: bool = False) -> None:
        super().__init__()
        self.importance = importance
        self.model = load_model(folder, device, getattr(torch, dtype), importance)

    def forward(self, inputs: Tensor) -> Tensor:
        types = inputs[2] if len(inputs) > 2 else None
        return self.model.padded(inputs[0], inputs[1], types, importance=self.importance)

    @torch.inference_mode()
    def unpadded(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """What `forward` returns of one text, int64 [tokens], without padding, sooner."""
        types = None if types is None else types[None]
        return self.model.padded(ids[None], types=types, importance=self.importance)[0]

    @property
    def facts(self) -> Facts:
        token_types = self.model.token_types
        return {"pad": self.model.pad, "vocabulary": self.model.vocabulary, "token_types": token_types}


def load_model(folder: Path, device: str, dtype: torch.dtype, importance: bool = False) -> Model:
    """The encoder in `folder` with the head that its files describe: ours, or transformers'. Raises ModelError."""
    attention_choice.for_device(device)
    config = read_json(folder / "config.json")
    if shape := EncoderShape.from_config(config):
        read = weights.read(folder, config, shape)
        with torch.device("meta"):
            model = EncoderModel(shape, read.head)
        tensors = {name: torch.from_numpy(array) for name, array in read.tensors.items()}
        placed = {name: each.to(device, dtype if each.is_floating_point() else None) for name, each in tensors.items()}
        model.load_state_dict(placed, assign=True)
        return model.eval().requires_grad_(False)
    from pliant.kernels.encoder.transformers_classifier import TransformersClassifier

    return TransformersClassifier(folder, config, device=device, dtype=dtype, importance=importance)
