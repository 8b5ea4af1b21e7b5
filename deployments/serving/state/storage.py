"""Where state lies: files that are created once, whole, and never changed. All of this blocks, and raises OSError.

A folder of this machine or of a share, or any storage that fsspec knows by a URL.
"""

from __future__ import annotations

import errno
import os
import posixpath
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pliant.cache import cache_folder, sync
from pliant.models.remote import is_remote

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""What file systems without hard links say."""


class Storage(Protocol):
    """Paths are relative, with slashes."""

    def names(self, folder: str) -> list[str]:
        """What lies in `folder` now; nothing if there is no such folder."""

    def read(self, path: str) -> bytes:
        """The content of a file."""

    def create(self, path: str, content: bytes) -> None:
        """Make a file that is not there yet, durably. Raises FileExistsError."""

    def rename(self, path: str, to: str) -> None:
        """Call a file something else."""

    def remove(self, path: str) -> None:
        """Remove a file."""


def default_folder() -> Path:
    """Where state lies if the configuration does not say."""
    return cache_folder() / "state"


def storage(place: str | None) -> Storage:
    """What `state` names in cluster.yaml: a folder, an fsspec URL, or None for the default folder.

    A folder that is named must be there when it is used: one that is not is perhaps a share that is not mounted.
    """
    if place is None:
        return FolderStorage(default_folder(), make=True)
    return UrlStorage(place) if is_remote(place) else FolderStorage(Path(place).expanduser())


class FolderStorage:
    """A folder. What was created is there, whole, after a power cut, too. Nobody sees the half of it, unless the file
    system has no hard links: then whoever looks while a file is written may, and after a power cut."""

    def __init__(self, root: Path, make: bool = False) -> None:
        """`make`: the folder need not be there."""
        self._root = root
        self._make = make

    def names(self, folder: str) -> list[str]:
        self._check()
        try:
            return os.listdir(self._root / folder)
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def create(self, path: str, content: bytes) -> None:
        self._check()
        target = self._root / path
        _make_folder(target.parent)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            _write(draft, content)
            os.link(draft, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            draft.unlink(missing_ok=True)  # it may have the last of the space
            _write_whole(target, content)
        finally:
            draft.unlink(missing_ok=True)
        sync(target.parent)

    def rename(self, path: str, to: str) -> None:
        os.replace(self._root / path, self._root / to)

    def remove(self, path: str) -> None:
        os.unlink(self._root / path)

    def _check(self) -> None:
        if not self._make and not self._root.is_dir():
            reason = "is no folder; make it, or mount the share that it is on"
            raise FileNotFoundError(errno.ENOENT, reason, str(self._root))


class UrlStorage:
    """An object storage, or whatever else fsspec knows, below `url`. It must be able to create exclusively."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connected: tuple[Any, str] | None = None

    def names(self, folder: str) -> list[str]:
        with _os_errors():
            files, root = self._connect()
            files.invalidate_cache()
            try:
                found = files.ls(posixpath.join(root, folder), detail=False)
            except FileNotFoundError:
                return []
            return [posixpath.basename(path.rstrip("/")) for path in found]

    def read(self, path: str) -> bytes:
        with _os_errors():
            files, root = self._connect()
            content: bytes = files.cat_file(posixpath.join(root, path))
            return content

    def create(self, path: str, content: bytes) -> None:
        with _os_errors():
            files, root = self._connect()
            self._create(files, posixpath.join(root, path), content)

    def rename(self, path: str, to: str) -> None:
        with _os_errors():
            files, root = self._connect()
            files.mv(posixpath.join(root, path), posixpath.join(root, to))

    def remove(self, path: str) -> None:
        with _os_errors():
            files, root = self._connect()
            files.rm_file(posixpath.join(root, path))

    def _connect(self) -> tuple[Any, str]:
        """The file system, once it has shown that it creates exclusively, and the path of the URL in it."""
        if self._connected is None:
            import fsspec

            files, root = fsspec.core.url_to_fs(self._url)  # type: ignore[no-untyped-call]
            self._check_exclusive(files, root)
            self._connected = files, root
        return self._connected

    def _check_exclusive(self, files: Any, root: str) -> None:
        probe = posixpath.join(root, f".probe.{uuid.uuid4().hex}")
        self._create(files, probe, b"first")
        try:
            self._create(files, probe, b"second")
        except FileExistsError:
            return
        finally:
            files.rm_file(probe)
        raise OSError(errno.ENOTSUP, "overwrites what it was asked to create; choose a storage that refuses", self._url)

    @staticmethod
    def _create(files: Any, path: str, content: bytes) -> None:
        from fsspec.spec import AbstractFileSystem

        files.makedirs(posixpath.dirname(path), exist_ok=True)
        try:
            if type(files).pipe_file is AbstractFileSystem.pipe_file:  # which looks first, and then overwrites
                with files.open(path, "xb") as opened:
                    opened.write(content)
            else:
                files.pipe_file(path, content, mode="create")
        except FileExistsError:
            raise
        except Exception:  # of stores that are not Amazon's, s3fs gives "precondition failed" in other words
            files.invalidate_cache()
            if files.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
            raise


@contextmanager
def _os_errors() -> Iterator[None]:
    """Clients of object storages raise errors of all kinds."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def _write(file: Path, content: bytes) -> None:
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _write_whole(file: Path, content: bytes) -> None:
    """Leaves nothing behind if it fails."""
    try:
        _write(file, content)
    except FileExistsError:
        raise
    except OSError:
        file.unlink(missing_ok=True)
        raise
