"""Folders on object storage, by fsspec URL: what is needed of one is fetched once per node and kept in the cache.

A *pinned* URL ends in `#` and the state that the files were in. What was fetched for one is never compared with the
storage again, so that every node has the same files, or says that they have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pliant.cache import cache_folder, made_once

_STATE_DIGITS = 16


def is_remote(folder: str) -> bool:
    """Whether it is a URL, and not a folder of this machine."""
    return "://" in folder


def is_below(folder: str, root: str) -> bool:
    """Whether the URL `folder` leads to a folder within the URL `root`, spelled plainly: no `..`, not even in percents
    that HTTP decodes, no query, and no second URL behind it, as fsspec chains them by `::`."""
    rest = unpinned(folder).removeprefix(root.rstrip("/") + "/")
    path = unquote(rest)
    plain = path.isprintable() and not any(mark in path for mark in ("::", "?", "\\"))
    return plain and all(part not in ("", ".", "..") for part in path.split("/")) and rest != unpinned(folder)


def unpinned(folder: str) -> str:
    """The URL without a state."""
    return folder.partition("#")[0]


def pinned(folder: str, names: Collection[str]) -> str:
    """The URL `folder` with the state that the files `names` in it are in now, as far as the storage tells.

    Raises ValueError if one is missing, or the storage cannot be asked.
    """
    files, path = _opened(folder)
    try:
        files.invalidate_cache()
        states = [f"{name} {sorted(files.info(f'{path}/{name}').items())}" for name in sorted(names)]
    except Exception as error:  # each storage has errors of its own
        raise _unreadable(folder, error) from error
    digest = hashlib.sha256("\n".join(states).encode()).hexdigest()
    return f"{unpinned(folder)}#{digest[:_STATE_DIGITS]}"


def fetched(folder: str, names: Collection[str], most_bytes: int) -> Path:
    """A local folder with the files `names` of the pinned URL `folder`, fetched if this node has none yet.

    Raises ValueError if one is missing, if they have more than `most_bytes` together, or the storage cannot be read.
    """
    digest = hashlib.sha256(folder.encode()).hexdigest()[:32]
    return made_once(
        cache_folder() / "remote" / digest, lambda local: _fetch(unpinned(folder), names, most_bytes, local)
    )


def _fetch(url: str, names: Collection[str], most_bytes: int, local: Path) -> None:
    files, path = _opened(url)
    try:
        size = sum(int(files.size(f"{path}/{name}")) for name in names)
        if size <= most_bytes:
            for name in names:
                files.get_file(f"{path}/{name}", str(local / name))
    except Exception as error:
        raise _unreadable(url, error) from error
    if size > most_bytes:
        raise ValueError(f"has {size / 2**20:,.1f} MB; at most {most_bytes / 2**20:,.1f} are read")


def _opened(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(unpinned(url))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise _unreadable(url, error) from error
    return files, str(path).rstrip("/")


def _unreadable(url: str, error: Exception) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"has not all files: {unpinned(str(error)) or url}")
    return ValueError(f"cannot be fetched ({type(error).__name__}: {error}); check the storage and its credentials")
