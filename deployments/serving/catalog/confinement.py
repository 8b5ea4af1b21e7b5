"""Which folders on this machine clients may name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pliant.errors import PliantError
from pliant.models.remote import is_remote, unpinned


class OutsideError(PliantError):
    """A path that leads out of the folders from which things may be loaded."""


class MissingError(PliantError):
    """A path to no folder."""


def confine(path: str, roots: Sequence[Path], purpose: str, writer: str) -> Path:
    """The folder that a client calls `path`: whole, or from one of the `roots` on, which are resolved paths.

    Raises OutsideError when it leads, by links or otherwise, out of all roots, whether it exists or not, and
    MissingError when there is no such folder in them. The messages say that `purpose`, such as "chat loads adapters",
    has these roots, and that `writer` makes such folders.
    """
    if not roots:
        raise outside(path, roots, purpose)
    try:
        meant = [(root / path).resolve() for root in roots]
        for folder in meant:
            if within(folder, roots) and folder.is_dir():
                return folder
    except (ValueError, RuntimeError, OSError):
        raise MissingError(f"{path!r} is no path") from None
    if all(within(folder, roots) for folder in meant):
        raise MissingError(f"there is no folder {path!r}; choose one that {writer} wrote")
    raise outside(path, roots, purpose)


def within(folder: Path, roots: Sequence[Path]) -> bool:
    """Whether `folder`, a resolved path, lies in one of `roots`."""
    return any(folder.is_relative_to(root) for root in roots)


def outside(path: str, roots: Sequence[Path | str], purpose: str) -> OutsideError:
    """What to say of a path that leads out of all `roots`."""
    listed = "cluster.yaml names them" if roots else "there are none"
    return OutsideError(f"{path!r} lies outside of the folders from which {purpose}: {listed}")


def public(path: str) -> str:
    """What clients are shown of a model or a folder: of an absolute path or a URL the last part, as the rest is the
    server's."""
    return Path(unpinned(path)).name if Path(path).is_absolute() or is_remote(path) else path
