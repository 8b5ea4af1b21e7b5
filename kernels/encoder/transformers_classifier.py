"""An encoder as transformers runs it: for models that are not ours to compute, and to compare those with."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pliant.errors import ModelError
from pliant.kernels.encoder.importance import received
from pliant.kernels.encoder.layout import Padded
from pliant.kernels.encoder.model import Head
from pliant.kernels.saved_tensors import SavedTensors
from pliant.models.decoder_info import read_json
from pliant.models.encoder_head import HeadShape, Sizes, head_of, task_of
from pliant.torchvision_ops import declare

_TRIAL = 8
"""Tokens of the text that shows whether a model's attention weights can be had."""
_AUTO = {
    "classify": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "embed": "AutoModel",
}
_POOLERS = ("pooler.",)
"""Weights that an embedding does without."""
_IN_A_LAYER = re.compile(r"\.layers?\.\d+\..*(?<!inv_freq)$")
"""Weights without which it would compute something else, such as relative positions, which transformers gave up."""


class TransformersClassifier(torch.nn.Module):
    """The encoder in `folder` with its head; `padded` is that of `EncoderModel`.

    `config` is what its config.json says. Raises `ModelError` if there is none, or one whose attention weights cannot
    be had and `importance` is wanted.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any] | None = None,
        *,
        device: str,
        dtype: torch.dtype,
        importance: bool = False,
    ) -> None:
        super().__init__()
        declare()
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        config = read_json(folder / "config.json") if config is None else config
        task = task_of(folder, config)
        try:
            model, report = getattr(transformers, _AUTO[task]).from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **({"attn_implementation": "eager"} if importance else {}),
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} cannot be read as an encoder for its task: {error}") from error
        needed = [name for name in report["missing_keys"] if task != "embed" or not name.startswith(_POOLERS)]
        if needed:
            missing = ", ".join(sorted(needed))
            raise ModelError(f"{folder} is no trained encoder for its task: it has no weights for {missing}")
        if unread := [name for name in report["unexpected_keys"] if _IN_A_LAYER.search(name)]:
            raise ModelError(f"{folder}: transformers does not read what its layers have: {', '.join(sorted(unread))}")
        self.model = model.eval().requires_grad_(False).to(device)
        self.head: Head | None = None
        if task == "embed":
            self.head = _head(folder, head_of(folder, config, Sizes("", model.config.hidden_size, 0.0)), device, dtype)
        self.labels_tokens = task == "tokens"
        self.importance = importance
        pad = model.config.pad_token_id
        self.pad: int = 0 if pad is None else pad
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.token_types: int = getattr(model.config, "type_vocab_size", 0) or 0
        if importance:
            self._check_attentions(folder)

    def padded(
        self, ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None, *, importance: bool = False
    ) -> Tensor:
        """See `EncoderModel.padded`."""
        mask = torch.ones_like(ids) if mask is None else mask
        output = self._run(ids, mask, types)
        if self.head is not None:
            found: Tensor = self.head(self.head.pooled(output.last_hidden_state.flatten(0, 1), Padded(ids, mask)))
            return found
        logits: Tensor = output.logits.float()
        return torch.cat([logits, received(output.attentions, mask)], 1) if importance else logits

    def _run(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Any:
        wanted: dict[str, Any] = {"output_attentions": True} if self.importance else {}
        if types is not None and self.token_types > 1:
            wanted["token_type_ids"] = types
        return self.model(input_ids=ids, attention_mask=mask, **wanted)

    def _check_attentions(self, folder: Path) -> None:
        ids = torch.ones(1, _TRIAL, dtype=torch.int64, device=self.model.device)
        weights = getattr(self._run(ids, ids), "attentions", None)
        if not weights or any(layer is None or layer.shape[2:] != (_TRIAL, _TRIAL) for layer in weights):
            raise ModelError(
                f"{folder} does not tell how its tokens attend to each other, and so not which words are important: "
                "choose an encoder with full attention in all layers, such as BERT, RoBERTa or DistilBERT"
            )


def _head(folder: Path, shape: HeadShape, device: str, dtype: torch.dtype) -> Head:
    head = Head(shape)
    for index, stage in enumerate(shape.stages):
        saved = SavedTensors(folder / stage.weights)
        state = {f"linear.{kind}": saved[f"linear.{kind}"] for kind in ("weight", "bias")[: 1 + stage.bias]}
        head.stages[index].load_state_dict(state)
    return head.eval().requires_grad_(False).to(device, dtype)
