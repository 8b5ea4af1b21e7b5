"""What clients loaded and unloaded at run time, adapters or tasks: one JSON file for each service, to outlive restarts.

All of this blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pliant.errors import PliantError


class StoredEntry(BaseModel):
    """One adapter or task that a client loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    created: int
    owner: str = ""
    """The tenant that loaded it."""


K = TypeVar("K", bound=StoredEntry)


class Stored(BaseModel, Generic[K]):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    service: str
    """Whose adapters or tasks these are."""
    loaded: dict[str, K] = {}
    """By name."""
    unloaded: dict[str, str] = {}
    """Those of the configured folder that are not to come back, and the revision that this was said of."""


class FileError(PliantError):
    """The file cannot be used, and why: it is left as it is."""


class BrokenFileError(PliantError):
    """The file holds something else; it has been put aside."""


class Store(Generic[K]):
    """The file of one service. `open` comes first; the methods that change it run in one thread at a time."""

    def __init__(self, file: Path, nothing: Stored[K], what: str) -> None:
        """`nothing` is what is kept for the service at first, `what` names the entries: "adapters" or "tasks"."""
        self._file = file
        self._kept = nothing
        self._what = what
        self._barred: FileError | None = FileError(f"{file.name} has not been read")
        """Why the file must not be written."""

    @property
    def loaded(self) -> Mapping[str, K]:
        """What clients loaded, by name, whether it can be served or not."""
        return self._kept.loaded

    def is_out(self, name: str, revision: str) -> bool:
        """Whether a client unloaded what the configured folder has as `name`, and its files are still the same."""
        return self._kept.unloaded.get(name) == revision

    def open(self) -> PliantError | None:
        """Read the file, if there is one; what is wrong with it."""
        self._barred = None
        try:
            self._kept = load(self._file, self._kept, self._what)
        except BrokenFileError as error:
            return error
        except FileError as error:
            self._barred = error
            return error
        return None

    def believe(self, name: str, entry: K) -> None:
        """`entry` is how the entry `name` reads now; it is written with the next change."""
        self._kept.loaded[name] = entry

    def keep(self, name: str, entry: K, instead_of: str | None = None) -> None:
        """Write down that a client loaded `entry` as `name`; `instead_of`: see `forget`. Raises FileError, and then
        nothing is changed."""
        kept = self._without(name, instead_of)
        self._write(kept.model_copy(update={"loaded": {**kept.loaded, name: entry}}))

    def forget(self, name: str, revision: str | None) -> None:
        """Write down that a client unloaded all that is called so. What the configured folder has of that name would
        come back, if it were not for its `revision`. Raises FileError, and then nothing is changed."""
        self._write(self._without(name, revision))

    def _without(self, name: str, revision: str | None) -> Stored[K]:
        changes: dict[str, object] = {
            "loaded": {other: each for other, each in self._kept.loaded.items() if other != name}
        }
        if revision is not None:
            changes["unloaded"] = {**self._kept.unloaded, name: revision}
        return self._kept.model_copy(update=changes)

    def _write(self, kept: Stored[K]) -> None:
        if self._barred:
            raise self._barred
        write(self._file, kept)
        self._kept = kept


def load(file: Path, nothing: Stored[K], what: str) -> Stored[K]:
    """What `file` keeps for the service of `nothing`, which is what is kept if there is no such file.

    A file that is not understood is renamed, for people to look at, and reported as a BrokenFileError. Raises FileError
    for one that cannot be read, or is another service's.
    """
    try:
        kept = type(nothing).model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return nothing
    except OSError as error:
        raise FileError(f"{file.name} cannot be read, so nothing is written there either: {error.strerror}") from None
    except ValidationError as error:
        raise _put_aside(file, error, what) from None
    if kept.service != nothing.service:
        raise FileError(
            f"{file.name} keeps the {what} of the service {kept.service}, so it is neither used nor written; choose "
            f"another file for {what}.registry, or move this one away"
        )
    return kept


def write(file: Path, kept: Stored[K]) -> None:
    """Replace `file` such that whoever reads it, even after a power cut, finds the old content or the new one, whole.

    Raises FileError, and then the old content is still there.
    """
    try:
        _replace(file, kept.model_dump_json().encode())
    except OSError as error:
        raise FileError(f"{file.name} cannot be written: {error.strerror}") from None


def _put_aside(file: Path, error: ValidationError, what: str) -> FileError | BrokenFileError:
    """Rename a file that is not understood; what to say of it."""
    aside = file.with_name(f"{file.name}.broken")
    reason = " ".join(str(error.errors(include_url=False)[0]["msg"]).split())
    try:
        file.replace(aside)
    except OSError as failed:
        return FileError(f"{file.name} is no registry of {what} ({reason}), and cannot be put aside: {failed.strerror}")
    return BrokenFileError(f"{file.name}: is no registry of {what} ({reason}); it is now {aside.name}")


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
