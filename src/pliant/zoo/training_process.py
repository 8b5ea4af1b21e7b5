"""Trains an entry of the zoo in a process of its own, `python -m pliant.zoo`, as whoever needs the entry sees it.

So the libraries of training are never imported by the caller, and it can stand behind what already serves.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from pliant.errors import ModelError
from pliant.zoo.shapes import Progress

COMMAND = (sys.executable, "-m", "pliant.zoo")


def train_apart(name: str, into: Path, progress: Progress, niceness: int) -> None:
    """Train the entry `name` into the folder `into`; `progress` is called in this thread.

    The process ends with this call, however that ends, and with this process. Raises ModelError with the reason if
    training fails.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            (*COMMAND, name, str(into), str(niceness)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process:
            try:
                for line in process.stdout:
                    told = json.loads(line)
                    progress(told["text"], told["done"])
            except BaseException:
                process.kill()
                raise
            process.wait()
        if process.returncode:
            raise ModelError(f"zoo/{name}: training failed: {_reason(complaints, process.returncode)}")


def _reason(complaints: IO[str], status: int) -> str:
    if status < 0:
        return f"its process was ended by signal {-status}; is there memory enough?"
    complaints.seek(0)
    lines = complaints.read().split("\n")
    return next((line for line in reversed(lines) if line.strip()), f"exit status {status}")
