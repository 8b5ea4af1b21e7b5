"""`python -m pliant.zoo NAME INTO NICENESS` trains an entry of the zoo into a folder.

Progress is told as lines of JSON on what was standard output; what libraries print there goes to standard error.
Whoever started it holds its standard input open: when that ends, so does this process. A failure is told in one line on
standard error.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from pliant import zoo
from pliant.background import work_in_background
from pliant.errors import PliantError

_EVERY_S = 0.25


def main(name: str, into: Path, niceness: int) -> int:
    """Train `name` into `into`; the exit status."""
    work_in_background(niceness)
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        zoo.train(name, into, Teller(told))
    except PliantError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


class Teller:
    """Writes progress to `out`, at most four times a second, and the end of it in any case."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next = 0.0

    def __call__(self, text: str, done: float) -> None:
        if (now := time.monotonic()) >= self._next or done >= 1:
            self._next = now + _EVERY_S
            print(json.dumps({"text": text, "done": round(done, 4)}), file=self._out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
