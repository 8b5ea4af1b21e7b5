"""What was measured of a service, as a folder of the cache; `made_once` puts it there. All of this blocks."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from pliant.cache import cache_folder

logger = logging.getLogger("pliant")

P = TypeVar("P")

Damaged = tuple[type[Exception], ...]


def folder_of(kept: str, service: str, identity: str) -> Path:
    """Where the profile of this identity lies, or will lie, in the folder `kept` of the cache."""
    return cache_folder() / kept / f"{service}-{identity}"


def load(folder: Path, read: Callable[[Path], P], damaged: Damaged) -> P | None:
    """The profile in `folder`, if it is there. One of which `read` raises one of `damaged` is removed, so that another
    can be kept.
    """
    if not folder.exists():
        return None
    try:
        return read(folder)
    except damaged:
        return _read_again(folder, read, damaged)


def _read_again(folder: Path, read: Callable[[Path], P], damaged: Damaged) -> P | None:
    """Alone, as another process may have removed what is damaged and kept another meanwhile (`made_once`)."""
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            return None
        try:
            return read(folder)
        except damaged as error:
            logger.warning("%s is damaged, and removed: it is measured again: %r", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            return None
