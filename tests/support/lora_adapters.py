"""Random LoRA adapters of the tiny decoders, saved as PEFT saves them, and the adapted models themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from support.decoders import make

from pliant.models.lora_layout import MODULES
from pliant.torchvision_ops import declare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS: dict[str, dict[str, Any]] = {
    "rank-1": {"r": 1},
    "rank-3-mlp": {"r": 3, "target_modules": ["gate_proj", "down_proj"], "lora_alpha": 1},
    "rank-8": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank-64-first-layers": {"r": 64, "layers_to_transform": [0, 2], "lora_alpha": 128},
    "rank-256": {"r": 256, "use_rslora": True},
    "patterns": {"r": 4, "rank_pattern": {r"layers\.1\..*k_proj": 9, "o_proj": 2}, "alpha_pattern": {"up_proj": 3}},
}
"""By name: what PEFT is asked for, beside the rest in `adapt`."""


def adapt(family: str, kind: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Save an adapter of `kind` for the decoder of `family` in `folder`; the decoder with it, in float32.

    Both of its matrices are random, and what they add is a third as large as the decoder's own.
    """
    declare()
    from peft import LoraConfig, get_peft_model

    config = {"lora_alpha": 16, "target_modules": list(MODULES), "task_type": "CAUSAL_LM", **KINDS[kind]}
    model = get_peft_model(make(family), LoraConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
                a.copy_(torch.randn(a.shape, generator=generator))
                b.copy_(torch.randn(b.shape, generator=generator) / (15 * module.scaling["default"] * len(a) ** 0.5))
    model.save_pretrained(folder)
    found: PreTrainedModel = model
    return found
