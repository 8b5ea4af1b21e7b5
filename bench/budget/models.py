"""Folders of models that nobody computes: what gateways and replicas read of a model, and weights that are nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.bench.budget.devices import LENGTH, MAX_LENGTH

SIDE = 8
"""Pixels of an image."""
_HIDDEN, _LABELS = 8, 2


def text_model(folder: Path) -> str:
    """A classifier whose tokens are words."""
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "max_position_embeddings": LENGTH,
        "pad_token_id": 0,
        "id2label": {str(index): f"label {index}" for index in range(_LABELS)},
    }
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "word": 1}, "[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _saved(folder, config, {}, tokenizer)


def image_model(folder: Path) -> str:
    """A vision transformer of one layer, with a head of its own."""
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": _LABELS,
        "pretrained_cfg": {"input_size": [3, SIDE, SIDE], "crop_pct": 1.0},
    }
    shapes = {
        "patch_embed.proj.weight": (_HIDDEN, 3, SIDE // 2, SIDE // 2),
        "cls_token": (1, 1, _HIDDEN),
        "blocks.0.attn.qkv.weight": (3 * _HIDDEN, _HIDDEN),
        "head.weight": (_LABELS, _HIDDEN),
    }
    return _saved(folder, config, shapes, None)


def chat_model(folder: Path) -> str:
    """A decoder of one layer, whose tokens are bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": _HIDDEN,
        "num_attention_heads": 1,
        "intermediate_size": _HIDDEN,
        "vocab_size": 256,
        "max_position_embeddings": MAX_LENGTH,
        "eos_token_id": None,
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _saved(folder, config, {}, tokenizer)


def _saved(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], tokenizer: Tokenizer | None
) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    if tokenizer:
        tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
