"""What was loaded and unloaded at run time, kept in one JSON file for each service, to outlive restarts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pliant.errors import PliantError


class KeptAdapter(BaseModel):
    """One adapter, as `AdapterRef` has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    revision: str
    ranks: tuple[int, ...]
    created: int


class Kept(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    base: str
    """The model that the adapters were checked against."""
    loaded: dict[str, KeptAdapter] = {}
    """By name."""
    unloaded: dict[str, str] = {}
    """Adapters of the configured folder that are not to come back, and the revision that this was said of."""


class BrokenFileError(PliantError):
    """The file holds something else; it has been put aside."""


def read(file: Path, base: str) -> Kept:
    """What `file` keeps; nothing, for the model `base`, if there is no such file.

    A file that is not understood is renamed, for people to look at, and reported as a BrokenFileError.
    """
    try:
        return Kept.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Kept(base=base)
    except ValidationError as error:
        aside = file.with_name(f"{file.name}.broken")
        file.replace(aside)
        reason = " ".join(str(error.errors(include_url=False)[0]["msg"]).split())
        raise BrokenFileError(f"{file}: is no registry of adapters ({reason}); it is now {aside.name}") from None


def write(file: Path, kept: Kept) -> None:
    """Replace `file` such that whoever reads it, even after a power cut, finds the old content or the new one, whole.

    Raises OSError, and then the old content is still there.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as opened:
        opened.write(kept.model_dump_json().encode())
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
