"""Where everything that is made once per user lies, and how processes that need the same thing share the making."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

Progress = Callable[[str, float], object]
"""Called with what is being done and the fraction done."""

_POLL_S = 0.2
_SHARE_EVERY_S = 0.25


def cache_folder() -> Path:
    """$PLIANT_CACHE, or else the user's cache folder for pliant; it need not exist yet."""
    root = os.environ.get("PLIANT_CACHE")
    return Path(root).expanduser() if root else platformdirs.user_cache_path("pliant")


def made_once(folder: Path, make: Callable[[Path], None], report: Progress | None = None) -> Path:
    """`folder`, filled by `make` unless that has been done before.

    `make` gets an empty folder beside it, which takes its name when all is there: what is unfinished is never seen. One
    process makes, others that ask meanwhile wait for it; `report` hears what the maker tells them through `shared`.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    _acquire(lock, folder, report)
    try:
        if not folder.exists():
            _make(folder, make)
    finally:
        lock.release()
    return folder


def shared(folder: Path, report: Progress | None) -> Progress:
    """`report`, and at the same time what others hear who wait in `made_once` for the same `folder`."""
    last = -_SHARE_EVERY_S

    def told(text: str, done: float) -> None:
        nonlocal last
        if report:
            report(text, done)
        if (now := time.monotonic()) - last >= _SHARE_EVERY_S:
            last = now
            draft = _progress_file(folder).with_suffix(".draft")
            with suppress(OSError):
                draft.write_text(json.dumps([text, done]))
                draft.replace(_progress_file(folder))

    return told


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
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        _progress_file(folder).unlink(missing_ok=True)


def _progress_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.progress")


def _read_progress(folder: Path) -> tuple[str, float] | None:
    try:
        text, done = json.loads(_progress_file(folder).read_text())
    except (OSError, ValueError):
        return None
    return str(text), float(done)
