"""Where everything that is made once per user lies, and how processes that need the same thing share the making."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger("pliant")

Progress = Callable[[str, float], object]
"""Called with what is being done and the fraction done."""

_MANIFEST = ".made.json"
"""Lists the files of what was made, and what `_fact` says of each."""
_SUMMED_BYTES = 2**20
"""Up to which size a file's content is looked at; of larger ones only the size."""
_POLL_S = 0.2
_SHARE_EVERY_S = 0.25


def cache_folder() -> Path:
    """$PLIANT_CACHE, or else the user's cache folder for pliant; it need not exist yet."""
    if root := os.environ.get("PLIANT_CACHE"):
        return Path(root).expanduser()
    import platformdirs  # kernels are imported where it is not installed

    return platformdirs.user_cache_path("pliant")


def made_once(folder: Path, make: Callable[[Path], None], report: Progress | None = None) -> Path:
    """`folder`, filled by `make` unless that has been done before; what was damaged since is made again.

    `make` gets an empty folder beside it, which takes its name when all is there and synced: what is unfinished is
    never seen, after a power cut neither. One process makes, others that ask meanwhile wait for it; `report` hears what
    the maker reports through `shared`.
    """
    if made(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    _acquire(lock, folder, report)
    try:
        if not made(folder):
            _make(folder, make)
    finally:
        lock.release()
    return folder


def made(folder: Path) -> bool:
    """Whether `folder` is there, with all that was made in it, undamaged as far as sizes and small files tell.

    Of what versions before this one made nothing is known but that files are not empty. What cannot be looked at is
    taken to be there, so that whoever reads it says why it cannot be read.
    """
    if not folder.is_dir():
        return False
    try:
        manifest = folder / _MANIFEST
        if not manifest.exists():
            return all(file.stat().st_size for file in _files(folder))
        facts = json.loads(manifest.read_bytes())
        return all(_fact(folder / name) == fact for name, fact in facts.items())
    except (FileNotFoundError, ValueError, AttributeError):
        return False
    except OSError:
        return True


def shared(folder: Path, report: Progress | None) -> Progress:
    """`report`, and at the same time what others hear who wait in `made_once` for the same `folder`."""
    last = -_SHARE_EVERY_S

    def tee(text: str, done: float) -> None:
        nonlocal last
        if report:
            report(text, done)
        if (now := time.monotonic()) - last >= _SHARE_EVERY_S:
            last = now
            draft = _progress_file(folder).with_suffix(".draft")
            with suppress(OSError):
                draft.write_text(json.dumps([text, done]))
                draft.replace(_progress_file(folder))

    return tee


def sync(path: Path) -> None:
    """Write to the disk what the system still has in memory of a file or folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _acquire(lock: FileLock, folder: Path, report: Progress | None) -> None:
    """Wait for `lock`, and pass on to `report` how far its holder is with `folder`."""
    while True:
        try:
            lock.acquire(timeout=-1 if report is None else _POLL_S, poll_interval=_POLL_S / 2)
        except Timeout:
            if report and (heard := _read_progress(folder)):
                report(*heard)
        else:
            return


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        make(unfinished)
        _seal(unfinished)
        _set_aside(folder)
        unfinished.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        _progress_file(folder).unlink(missing_ok=True)


def _seal(folder: Path) -> None:
    """Note what was made, and have all of it outlive a power cut."""
    manifest = folder / _MANIFEST
    manifest.unlink(missing_ok=True)  # it may be a link to that of a folder whose files are used here
    manifest.write_text(json.dumps({str(file.relative_to(folder)): _fact(file) for file in _files(folder)}))
    for path in (*_files(folder), *(each for each in folder.rglob("*") if each.is_dir()), folder):
        sync(path)


def _set_aside(folder: Path) -> None:
    """Remove what is damaged; whoever has it open goes on with it."""
    if folder.exists():
        logger.warning("%s is damaged, and was made again", folder)
        damaged = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _fact(file: Path) -> list[int | None]:
    """The size of a file, and the checksum of a small one."""
    size = file.stat().st_size
    return [size, zlib.crc32(file.read_bytes()) if size <= _SUMMED_BYTES else None]


def _progress_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.progress")


def _read_progress(folder: Path) -> tuple[str, float] | None:
    try:
        text, done = json.loads(_progress_file(folder).read_text())
    except (OSError, ValueError):
        return None
    return str(text), float(done)
