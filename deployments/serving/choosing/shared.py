"""Profiles in the state of the cluster: a planner on another node need not measure again.

Each is one zip archive, of what the cache folder holds of it. All of this blocks, and raises nothing.
"""

from __future__ import annotations

import io
import logging
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pliant.cache import made_once
from pliant.deployments.serving.state.storage import Storage

logger = logging.getLogger("pliant")

_DAMAGED = (EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error)
"""Raised by reading an archive that is not as it was written."""


class SharedProfiles:
    """Those in the `folder` of `state`, each of which has `files`."""

    def __init__(self, state: Storage, folder: str, files: Sequence[str]) -> None:
        self._state = state
        self._folder = folder
        self._files = files
        self._looked: set[Path] = set()
        """Profiles that were looked for: whoever removes one from the cache wants another."""

    def fetch(self, folder: Path) -> None:
        """Have the profile of `folder` in the cache if it is in the state, and this is the first time to look."""
        if folder in self._looked:
            return
        self._looked.add(folder)
        try:
            files = _unpacked(self._state.read(self._path(folder)), self._files)
            made_once(folder, lambda into: _write(files, into))
        except FileNotFoundError:
            return
        except _DAMAGED as error:
            logger.warning("the profile %s in the state is damaged: it is measured again: %r", folder.name, error)
        except OSError as error:
            logger.warning("the profile %s cannot be taken from the state: %r", folder.name, error)

    def share(self, folder: Path) -> None:
        """Keep the profile of `folder` in the state, instead of one that is there."""
        try:
            content = _packed({name: (folder / name).read_bytes() for name in self._files})
            with suppress(FileNotFoundError):
                self._state.remove(self._path(folder))
            with suppress(FileExistsError):  # another planner has measured it, too
                self._state.create(self._path(folder), content)
        except OSError as error:
            logger.warning("the profile %s cannot be kept in the state, for other nodes: %r", folder.name, error)

    def _path(self, folder: Path) -> str:
        return f"{self._folder}/{folder.name}"


def _packed(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return archive.getvalue()


def _unpacked(archive: bytes, files: Sequence[str]) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in files}


def _write(files: Mapping[str, bytes], into: Path) -> None:
    for name, content in files.items():
        (into / name).write_bytes(content)
