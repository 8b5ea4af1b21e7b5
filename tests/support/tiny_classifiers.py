"""Tiny untrained encoders with the heads of their tasks, as transformers saves them and as it runs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.torchvision_ops import declare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY, LABELS, LAYERS, HEADS = 99, 3, 3, 2
PAD = 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_labels": LABELS,
    "initializer_range": 0.2,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "position_biased_input": False,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "distilbert": {"dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64},
    "electra": {"embedding_size": 16},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "initializer_cutoff_factor": 1.0},
}


AUTO = {
    "classify": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "embed": "AutoModel",
}
"""By task (see `encoder_head.Task`): the class that transformers makes and reads models with."""


def save(folder: Path, kind: str, task: str = "classify", **options: Any) -> Path:
    """`folder`, with a random encoder of that model type; `options` are of its config. All weights differ from 0."""
    declare()
    import transformers as hf

    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, **_COMMON | _SPECIAL.get(kind, {}) | options)
    model = getattr(hf, AUTO[task]).from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name.lower():
            torch.nn.init.normal_(parameter, mean=float("norm" in name.lower() and "weight" in name), std=0.2)
    model.save_pretrained(folder)
    return folder


def save_with_words(folder: Path, kind: str, **options: Any) -> Path:
    """`save`, with a tokenizer whose words are w0 (also for others), w1 and so on."""
    save(folder, kind, **options)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def read(folder: Path, task: str = "classify") -> PreTrainedModel:
    """The model in `folder` as transformers computes it step by step."""
    declare()
    import transformers as hf

    model: PreTrainedModel = getattr(hf, AUTO[task]).from_pretrained(folder, attn_implementation="eager")
    return model.eval()
