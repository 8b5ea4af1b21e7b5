"""A sequence classifier as transformers runs it: for models that are not ours to compute, and to compare those with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pliant.errors import ModelError
from pliant.kernels.encoder.importance import received
from pliant.torchvision_ops import declare

_TRIAL = 8
"""Tokens of the text that shows whether a model's attention weights can be had."""


class TransformersClassifier(torch.nn.Module):
    """The classifier in `folder`; `forward` is that of `EncoderClassifier`.

    Raises `ModelError` if there is none, or one whose attention weights cannot be had and `importance` is wanted.
    """

    def __init__(self, folder: Path, *, device: str, dtype: torch.dtype, importance: bool = False) -> None:
        super().__init__()
        declare()
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **({"attn_implementation": "eager"} if importance else {}),
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} cannot be read as a sequence classifier: {error}") from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"]))
            raise ModelError(f"{folder} is no trained sequence classifier: it has no weights for {missing}")
        self.model = model.eval().requires_grad_(False).to(device)
        self.importance = importance
        pad = model.config.pad_token_id
        self.pad: int = 0 if pad is None else pad
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        if importance:
            self._check_attentions(folder)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        output = self._run(ids, mask)
        logits: Tensor = output.logits.float()
        return torch.cat([logits, received(output.attentions, mask)], 1) if self.importance else logits

    def _run(self, ids: Tensor, mask: Tensor) -> Any:
        wanted = {"output_attentions": True} if self.importance else {}
        return self.model(input_ids=ids, attention_mask=mask, **wanted)

    def _check_attentions(self, folder: Path) -> None:
        ids = torch.ones(1, _TRIAL, dtype=torch.int64, device=self.model.device)
        weights = getattr(self._run(ids, ids), "attentions", None)
        if not weights or any(layer is None or layer.shape[2:] != (_TRIAL, _TRIAL) for layer in weights):
            raise ModelError(
                f"{folder} does not tell how its tokens attend to each other, and so not which words are important: "
                "choose an encoder with full attention in all layers, such as BERT, RoBERTa or DistilBERT"
            )
