"""What decides which answer a seed gives, in a few characters."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pliant
from pliant.config.llm import LlmConfig
from pliant.models.revision import add_files

_CODE = ("kernels/cpu", "kernels/decoder", "sampling.py")
"""Below the package: what computes logits and draws tokens."""


def fingerprint(config: LlmConfig, folder: Path) -> str:
    """Changes with the model in `folder`, with how it is computed, and with the code; the same on every node."""
    way = f"{config.dtype} {config.quantize} {config.device}"
    digest = hashlib.sha256(f"{pliant.__version__} {config.model} {way}".encode())
    package = Path(pliant.__file__).parent
    for name in _CODE:
        found = package / name
        for file in sorted(found.glob("*.[pch]*")) if found.is_dir() else [found]:
            if file.is_file():
                digest.update(file.read_bytes())
    add_files(digest, folder)
    return f"fp_{digest.hexdigest()[:10]}"
