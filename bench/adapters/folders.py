"""Adapters of random weights in PEFT's format, saved once: how fast they are does not depend on what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from pliant.bench.llm.checkpoints import Size
from pliant.cache import cache_folder, made_once

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""That adapters adapt, as in the paper and in S-LoRA."""
_STANDARD_DEVIATION = 0.02


def folders(size: Size, ranks: Sequence[int], dtype: str) -> list[Path]:
    """A folder for each rank, in order, that fits a model of `size`. Kept in the user's cache."""
    name = f"adapters-{size.name}-{dtype}-{len(ranks)}x{max(ranks)}-v1"
    made = made_once(cache_folder() / "bench" / name, lambda folder: _save(size, ranks, dtype, folder))
    return [made / str(index) for index in range(len(ranks))]


def _save(size: Size, ranks: Sequence[int], dtype: str, folder: Path) -> None:
    random = torch.Generator().manual_seed(0)
    for index, rank in enumerate(ranks):
        tensors = {}
        for layer in range(size.layers):
            for module in MODULES:
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                for matrix, shape in (("lora_A", (rank, size.hidden)), ("lora_B", (size.hidden, rank))):
                    values = torch.randn(shape, generator=random) * _STANDARD_DEVIATION
                    tensors[f"{name}.{matrix}.weight"] = values.to(getattr(torch, dtype))
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": list(MODULES),
            "bias": "none",
            "base_model_name_or_path": None,
        }
        adapter = folder / str(index)
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, adapter / "adapter_model.safetensors")
