"""Where everything that is made once per user lies."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock


def cache_folder() -> Path:
    """$PLIANT_CACHE, or else the user's cache folder for pliant; it need not exist yet."""
    root = os.environ.get("PLIANT_CACHE")
    return Path(root).expanduser() if root else platformdirs.user_cache_path("pliant")


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` unless that has been done before.

    `make` gets an empty folder beside it, which takes its name when all is there: what is unfinished is never seen. One
    process makes, others that ask meanwhile wait for it.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder
