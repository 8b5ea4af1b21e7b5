"""Where Triton keeps the kernels that it compiles, so that a replica that starts again need not."""

import os

from pliant.cache import cache_folder


def keep() -> None:
    """Have it keep them with all that is made once, unless $TRITON_CACHE_DIR names another folder. Before any kernel
    runs."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
