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
    base: str
    """The model that it was last checked against."""


class Kept(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    service: str
    """Whose adapters these are."""
    loaded: dict[str, KeptAdapter] = {}
    """By name."""
    unloaded: dict[str, str] = {}
    """Adapters of the configured folder that are not to come back, and the revision that this was said of."""


class FileError(PliantError):
    """The file cannot be used, and why: it is left as it is."""


class BrokenFileError(PliantError):
    """The file holds something else; it has been put aside."""


def read(file: Path, service: str) -> Kept:
    """What `file` keeps for `service`; nothing if there is no such file.

    A file that is not understood is renamed, for people to look at, and reported as a BrokenFileError. Raises FileError
    for one that cannot be read, or is another service's.
    """
    try:
        kept = Kept.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Kept(service=service)
    except OSError as error:
        raise FileError(f"{file} cannot be read, so nothing is written there either: {error.strerror}") from None
    except ValidationError as error:
        raise _put_aside(file, error) from None
    if kept.service != service:
        raise FileError(
            f"{file} keeps the adapters of the service {kept.service}, so it is neither used nor written; choose "
            f"another file for adapters.registry, or move this one away"
        )
    return kept


def write(file: Path, kept: Kept) -> None:
    """Replace `file` such that whoever reads it, even after a power cut, finds the old content or the new one, whole.

    Raises FileError, and then the old content is still there.
    """
    try:
        _replace(file, kept.model_dump_json().encode())
    except OSError as error:
        raise FileError(f"{file} cannot be written: {error.strerror}") from None


def _put_aside(file: Path, error: ValidationError) -> FileError | BrokenFileError:
    """Rename a file that is not understood; what to say of it."""
    aside = file.with_name(f"{file.name}.broken")
    reason = " ".join(str(error.errors(include_url=False)[0]["msg"]).split())
    try:
        file.replace(aside)
    except OSError as failed:
        return FileError(f"{file} is no registry of adapters ({reason}), and cannot be put aside: {failed.strerror}")
    return BrokenFileError(f"{file}: is no registry of adapters ({reason}); it is now {aside.name}")


def _replace(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
