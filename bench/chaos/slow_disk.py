"""A store whose every step takes a while when it is told to: what `state` of a cluster lies on that has a slow disk.

fsspec finds it by an entry point, in every process that has the folder with `plugin` in its PYTHONPATH.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

SWITCH = "PLIANT_BENCH_SLOW_DISK"
"""The environment variable that names a file: while it is there, it holds the seconds that a step takes."""
_URL = "slow://"


class SlowDisk(LocalFileSystem):
    """A local folder behind slow://."""

    protocol = ("slow",)  # type: ignore[assignment]  # it has two
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix(_URL))  # type: ignore[no-untyped-call]

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        _take_time()
        return super().ls(path, *args, **kwargs)  # type: ignore[no-untyped-call]

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        _take_time()
        return super().open(path, *args, **kwargs)  # type: ignore[no-untyped-call]

    def rm_file(self, path: str) -> None:
        _take_time()
        super().rm_file(path)  # type: ignore[no-untyped-call]


def plugin(folder: Path) -> None:
    """Have fsspec find it where `folder` is in PYTHONPATH."""
    told = folder / "pliant_bench_slow_disk-0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: pliant-bench-slow-disk\nVersion: 0\n")
    (told / "entry_points.txt").write_text(f"[fsspec.specs]\nslow = {__name__}:{SlowDisk.__name__}\n")


def begin(seconds: float) -> None:
    """From now on each step takes as long."""
    Path(os.environ[SWITCH]).write_text(str(seconds))


def end() -> None:
    """They take no time any more."""
    Path(os.environ[SWITCH]).unlink(missing_ok=True)


def _take_time() -> None:
    try:
        seconds = float(Path(os.environ[SWITCH]).read_text())
    except FileNotFoundError:
        return
    time.sleep(seconds)
