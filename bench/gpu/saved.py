"""Folders of models with random weights, as services load them; made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.bench.gpu import decoders
from pliant.bench.gpu.scale import Scale
from pliant.bench.llm.checkpoints import tokenizer
from pliant.cache import cache_folder, made_once
from pliant.kernels.decoder.weights import RandomWeights, tensor_sizes
from pliant.kernels.vision.plain_vit import PlainViT
from pliant.models.vision_info import CONFIG, WEIGHTS, VisionInfo, vision_input
from pliant.torchvision_ops import declare

CLASSIFIERS: dict[str, dict[str, int]] = {
    "BERT-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "MiniLM": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
LONGEST = 512
"""Tokens of a text that they read."""
_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_WORDS = {"[PAD]": 0, "[UNK]": 1} | {f"w{index}": 2 + index for index in range(398)}


def decoder(name: str, scale: Scale) -> Path:
    """A language model of `decoders.CONFIGS`, whose tokens are bytes and made-up words; none of them ends an answer."""

    def make(into: Path) -> None:
        config = decoders.config(name, scale.dry) | {"eos_token_id": None, "torch_dtype": scale.dtype_name}
        shape = decoders.shape(name, scale.dry)
        weights = RandomWeights(shape, scale.dtype, scale.device)
        tensors = {}
        for tensor, size in tensor_sizes(shape).items():
            tensors[tensor] = torch.empty(size, dtype=scale.dtype, device=scale.device)
            weights.copy(tensor, tensors[tensor])
        (into / "config.json").write_text(json.dumps(config) + "\n")
        save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
        tokenizer(shape.vocab).save(str(into / "tokenizer.json"))
        tensors.clear()
        if scale.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later, services lack

    return _made(f"decoder-{name}", scale.dry, make)


def classifier(name: str, dry: bool) -> Path:
    """One of `CLASSIFIERS`, whose tokens are words; a tiny one, whatever the name, if it is `dry`."""

    def make(into: Path) -> None:
        declare()
        from transformers import AutoConfig, AutoModelForSequenceClassification

        hf: Any = AutoModelForSequenceClassification
        options = {
            **(_TINY if dry else CLASSIFIERS[name]),
            "vocab_size": 400 if dry else 30522,
            "max_position_embeddings": LONGEST,
            "num_labels": 2,
        }
        hf.from_config(AutoConfig.for_model("bert", **options)).save_pretrained(into)
        words = Tokenizer(models.WordLevel(_WORDS, "[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(into / "tokenizer.json"))

    return _made(name, dry, make)


def vision_transformer(dry: bool) -> Path:
    """ViT-Base in timm's files."""
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

    return _made(name, dry, make)


def _made(name: str, dry: bool, make: Callable[[Path], None]) -> Path:
    return made_once(cache_folder() / "bench" / f"random-{name}{'-tiny' * dry}-v2", make)
