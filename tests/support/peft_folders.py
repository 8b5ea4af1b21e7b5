"""Adapters and models as folders, small and without weights that mean anything: what the registry reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, LAYERS = 16, 2
SLOT_TOKEN_BYTES = 2 * LAYERS * HIDDEN * 4
"""Keys and values of one token in float32."""


def model_folder(folder: Path, **changes: Any) -> str:
    """A model's folder as far as its config.json goes; its path."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 64,
        **changes,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def adapter_folder(folder: Path, rank: int = 4, base: str = "a/model", seed: int = 0, hidden: int = HIDDEN) -> Path:
    """A PEFT folder of an adapter of q_proj."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": base,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{{}}.weight"
        tensors[name.format("A")] = random.standard_normal((rank, hidden)).astype(np.float32)
        tensors[name.format("B")] = random.standard_normal((hidden, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", {"seed": str(seed)})
    return folder
