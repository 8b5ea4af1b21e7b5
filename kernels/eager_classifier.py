"""A `transformers` sequence classifier as it comes: the reference for compiled runtimes, and their stand-in."""

from pathlib import Path
from typing import TypedDict

import torch

from pliant.errors import ModelError
from pliant.torchvision_mend import mend


class Facts(TypedDict):
    """What a runtime must know to pad and check token ids: the pad token and the size of the vocabulary."""

    pad: int
    vocabulary: int


class EagerClassifier(torch.nn.Module):
    """The model as transformers runs it, with one tensor in and one out.

    `forward` takes int64 (2, length), token ids above the attention mask, and returns float32 (labels,).
    Raises `ModelError` if `folder` holds no sequence classifier.
    """

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        super().__init__()
        mend()
        from transformers import AutoModelForSequenceClassification

        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} cannot be read as a sequence classifier: {error}") from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"]))
            raise ModelError(f"{folder} is no trained sequence classifier: it has no weights for {missing}")
        self.model = model.eval().requires_grad_(False).to(device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=inputs[:1], attention_mask=inputs[1:]).logits
        return logits[0].float()

    @property
    def facts(self) -> Facts:
        pad = self.model.config.pad_token_id
        return {
            "pad": 0 if pad is None else pad,
            "vocabulary": self.model.get_input_embeddings().num_embeddings,
        }
