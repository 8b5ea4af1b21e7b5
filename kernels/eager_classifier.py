"""A `transformers` sequence classifier as it comes: the reference for compiled runtimes, and their stand-in."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from pliant.errors import ModelError
from pliant.kernels.importance import received
from pliant.torchvision_mend import mend

if TYPE_CHECKING:
    from transformers.modeling_outputs import SequenceClassifierOutput


_TRIAL = 8
"""Tokens of the text that shows whether a model's attention weights can be had."""


class Facts(TypedDict):
    """What a runtime must know to pad and check token ids: the pad token and the size of the vocabulary."""

    pad: int
    vocabulary: int


class EagerClassifier(torch.nn.Module):
    """The model as transformers runs it, with one tensor in and one out.

    `forward` takes int64 (2, length), token ids above the attention mask, and returns float32 (labels,), or float32
    (labels + length,) if it is to give the `importance` of each token too (see `importance.received`).
    Raises `ModelError` if `folder` holds no sequence classifier, or one whose attention weights cannot be had.
    """

    def __init__(self, folder: Path, *, device: str, dtype: str, importance: bool = False) -> None:
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
                **({"attn_implementation": "eager"} if importance else {}),
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} cannot be read as a sequence classifier: {error}") from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"]))
            raise ModelError(f"{folder} is no trained sequence classifier: it has no weights for {missing}")
        self.model = model.eval().requires_grad_(False).to(device)
        self.importance = importance
        if importance:
            self._check_attentions(folder)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.importance:
            return self._logits(self.model(input_ids=inputs[:1], attention_mask=inputs[1:]))
        output = self.model(input_ids=inputs[:1], attention_mask=inputs[1:], output_attentions=True)
        return torch.cat([self._logits(output), received(output.attentions, inputs[1:])[0]])

    def _logits(self, output: "SequenceClassifierOutput") -> torch.Tensor:
        assert output.logits is not None
        return output.logits[0].float()

    def _check_attentions(self, folder: Path) -> None:
        inputs = torch.ones(2, _TRIAL, dtype=torch.int64, device=self.model.device)
        output = self.model(input_ids=inputs[:1], attention_mask=inputs[1:], output_attentions=True)
        weights = getattr(output, "attentions", None)
        if not weights or any(layer is None or layer.shape[2:] != (_TRIAL, _TRIAL) for layer in weights):
            raise ModelError(
                f"{folder} does not tell how its tokens attend to each other, and so not which words are important: "
                "choose an encoder with full attention in all layers, such as BERT, RoBERTa or DistilBERT"
            )

    @property
    def facts(self) -> Facts:
        pad = self.model.config.pad_token_id
        return {
            "pad": 0 if pad is None else pad,
            "vocabulary": self.model.get_input_embeddings().num_embeddings,
        }
