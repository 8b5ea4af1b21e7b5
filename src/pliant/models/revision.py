"""Which version of a model a folder has, in a few characters; the same on every node."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pliant.models import hub
from pliant.models.encoder_info import EncoderInfo

_LOOKED_AT = 65_536
"""Bytes of each part of the weights, which are not read whole."""
_PARTS = 8


def revision(folder: Path) -> str:
    """Changes with the files in `folder`."""
    digest = hashlib.sha256()
    add_files(digest, folder)
    return f"fp_{digest.hexdigest()[:10]}"


def interface(folder: Path, info: EncoderInfo) -> str:
    """Changes with what must be alike where the texts of an encoder are tokenized and where they are computed."""
    prompts = [sorted(info.prompts.items()), info.default_prompt]
    said = [info.task, info.labels, info.dimensions, info.pairs, *prompts, info.lowercase]
    digest = hashlib.sha256((folder / hub.TOKENIZER).read_bytes())
    digest.update(json.dumps(said).encode())
    return digest.hexdigest()[:10]


def add_files(digest: hashlib._Hash, folder: Path) -> None:
    """Add the files of the model in `folder` to `digest`."""
    for file in sorted({file for pattern in hub.FILES for file in folder.glob(pattern)}):
        if file.suffix == ".safetensors":
            _add_parts(digest, file)
        else:
            digest.update(file.read_bytes())


def _add_parts(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as weights:
        for part in range(_PARTS):
            weights.seek(size * part // _PARTS)
            digest.update(weights.read(_LOOKED_AT))
