"""Writes what the zoo has trained as transformers reads it, without importing that."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor


def save_weights(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """The weights of a model by transformers' names, and its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_json({**config, "dtype": "float32"}, folder / "config.json")
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(tokenizer: Tokenizer, longest: int, special: Mapping[str, Any], folder: Path) -> None:
    """Saved without truncation: who serves the model wants to know of a text that is longer than `longest` tokens."""
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, **special}
    save_json(described, folder / "tokenizer_config.json")


def save_json(content: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
