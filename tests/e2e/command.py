"""`pliant`, which knows the toy kind beside ours: `python -m e2e.command serve cluster.yaml`.

The file's application is to be `e2e.application`, which knows it, too.
"""

from __future__ import annotations

from e2e.application import IMPORT_PATH, READER
from pliant.config import cluster
from pliant.deployments import kinds

if __name__ == "__main__":
    cluster.IMPORT_PATH = IMPORT_PATH
    kinds.read = READER.read
    from pliant.cli.command import main  # only now, as it takes over `read`

    main()
