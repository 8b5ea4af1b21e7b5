"""A vision transformer by gamma and batch: what merging saves, and prompt tokens cost (OTAS §III-B, figures 4b, 7)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale
from pliant.cache import cache_folder, made_once
from pliant.kernels.vision import executor as vit_executor
from pliant.kernels.vision import profile as vit_profile
from pliant.kernels.vision.plain_vit import PlainViT
from pliant.models.vision_info import CONFIG, WEIGHTS, VisionInfo, merging_gammas, vision_input

_MERGED = -13
"""Tokens by layer that the goal is about."""
_PROMPTS = (2, 4, 8)
_BATCHES = (1, 8, 32, 64)


def run(record: Record, scale: Scale) -> None:
    """As it is loaded, and then with the gammas prepared: on a GPU recorded as graphs."""
    batches, budget_s = ((1, 2), 0.1) if scale.dry else (_BATCHES, 20.0)
    loaded = vit_executor.load(
        _folder(scale.dry), dtype=scale.dtype_name, device=scale.device.type, most_rows=max(batches)
    )
    merged = merging_gammas(loaded.info) if scale.dry else (*merging_gammas(loaded.info), _MERGED)
    gammas = (*merged, 0, *_PROMPTS)
    for prepared in (False, True):
        with record.part("prepared" if prepared else "as loaded"):
            if prepared and scale.dry:
                continue  # on a CPU each gamma is compiled for half a minute
            if prepared:
                loaded.prepare(gammas)
            table = vit_profile.measure(loaded, gammas, batches, budget_s=budget_s)
            record.tables[loaded.backend] = asdict(table)
            for gamma in merged:
                for rows in table.batches:
                    speedup = table.latency(0, rows) / table.latency(gamma, rows)
                    record.figures[f"merging_{-gamma}_speedup_{loaded.backend}_b{rows}"] = speedup


def _folder(dry: bool) -> Path:
    """A vision transformer in timm's files with random weights, made once."""
    name, side, sizes = "vit_base_patch16_224", 224, {"embed_dim": 768, "depth": 12, "num_heads": 12}
    if dry:
        name, side, sizes = "vit_tiny_patch16_224", 64, {"embed_dim": 32, "depth": 2, "num_heads": 2}
    config = {
        "architecture": name,
        "num_classes": 10,
        "model_args": {**sizes, "img_size": side},
        "pretrained_cfg": {"input_size": [3, side, side]},
    }

    def make(into: Path) -> None:
        image = vars(vision_input(config, name))
        info = VisionInfo(**image, layers=sizes["depth"], hidden=sizes["embed_dim"], patch=16, prefix=1)
        model = PlainViT(info, sizes["num_heads"], 4 * sizes["embed_dim"], averaged=False)
        for parameter in ("cls_token", "pos_embed"):
            torch.nn.init.normal_(model.get_parameter(parameter), std=0.02)
        (into / CONFIG).write_text(json.dumps(config) + "\n")
        save_file(model.state_dict(), into / WEIGHTS, metadata={"format": "pt"})

    return made_once(cache_folder() / "bench" / f"random-{name}-{side}", make)
