"""Where everything that is made once per user lies."""

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """$PLIANT_CACHE, or else the user's cache folder for pliant; it need not exist yet."""
    root = os.environ.get("PLIANT_CACHE")
    return Path(root).expanduser() if root else platformdirs.user_cache_path("pliant")
