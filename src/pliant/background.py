"""Processes that work for another one in the background: behind others, and no longer than whoever started them.

A process that outlived its parent would write into a folder that the next one makes anew.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

BEHIND_OTHERS = 5
"""The niceness of what hardly anybody should notice: it gets a third of the time of whoever computes beside it.

With 10 it would starve where several compute.
"""


def work_in_background(niceness: int = BEHIND_OTHERS) -> None:
    """To be called in such a process: it ends when its standard input does, which whoever started it holds open.

    It should lead a session of its own: where Linux shares processors among sessions first (autogroups), niceness
    counts within one session alone, and the session needs the same.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no autogroups here
            Path("/proc/self/autogroup").write_text(str(niceness))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def run_in_background(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """What `command`, which works in the background, came to; it ends with this process. Raises TimeoutExpired."""
    held_open, ours = os.pipe()
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=held_open,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            start_new_session=True,
        )
    finally:
        os.close(held_open)
        os.close(ours)


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)
