"""What decides which answer a seed gives, in a few characters."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pliant
from pliant.config.llm import LlmConfig

_CODE = ("kernels/decoder", "sampling.py")
"""Below the package: what computes logits and draws tokens."""
_LOOKED_AT = 65_536
"""Bytes of each part of the weights, which are not read whole."""
_PARTS = 8


def fingerprint(config: LlmConfig, folder: Path) -> str:
    """Changes with the model in `folder`, with how it is computed, and with the code; the same on every node."""
    digest = hashlib.sha256(f"{pliant.__version__} {config.model} {config.dtype} {config.device}".encode())
    package = Path(pliant.__file__).parent
    for name in _CODE:
        found = package / name
        for file in sorted(found.glob("*.[pch]*")) if found.is_dir() else [found]:
            if file.is_file():
                digest.update(file.read_bytes())
    for file in sorted(folder.glob("*.json")):
        digest.update(file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        _add_parts(digest, file)
    return f"fp_{digest.hexdigest()[:10]}"


def _add_parts(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as weights:
        for part in range(_PARTS):
            weights.seek(size * part // _PARTS)
            digest.update(weights.read(_LOOKED_AT))
