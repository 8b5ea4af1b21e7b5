"""Finds compilers; compiles C sources for the machine they run on, once, and loads them."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pliant.cache import cache_folder, made_once

OPTIONS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread")
_X86 = platform.machine() in ("x86_64", "AMD64")
THIS_MACHINE = ("-march=native", "-mprefer-vector-width=512") if _X86 else ("-mcpu=native",)
"""Lets the compiler use every instruction that this machine's CPU has."""


class CompilerError(Exception):
    """Why there is no compiled library, and what to do, for the operator."""


def compiler() -> str | None:
    """The C compiler's command: $CC, or else the first of cc, gcc and clang that is there."""
    return next(filter(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))), None)


def cxx_compiler() -> str | None:
    """The C++ compiler's: $CXX, or else the first of g++ and clang++ that is there."""
    return next(filter(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))), None)


def libraries() -> Path:
    """The folder in which compiled libraries are kept."""
    return cache_folder() / "libraries"


def library(sources: Sequence[Path], options: Sequence[str] = THIS_MACHINE) -> ctypes.CDLL:
    """The C `sources` as one loaded library.

    It is compiled on first use and kept in the cache folder, under a name that depends on the text of the sources and
    of the headers beside them, the options, and all that the compiler says of itself and of the CPU.
    Raises `CompilerError` if there is no compiler or it fails.
    """
    command = compiler()
    if command is None:
        raise CompilerError("no C compiler was found (CC, cc, gcc or clang); install one (apt-get install gcc)")
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    texts = [path.read_bytes() for path in (*sources, *headers)]
    macros = _run([command, *options, "-dM", "-E", "-x", "c", os.devnull])
    key = hashlib.sha256(repr((texts, OPTIONS, options, command, macros)).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        _run([command, *OPTIONS, *options, *map(str, sources), "-o", str(folder / "library.so"), "-lm"])

    try:
        folder = made_once(libraries() / f"{sources[0].stem}-{key}", build)
    except OSError as error:
        raise CompilerError(
            f"the cache folder cannot be written ({error}); set PLIANT_CACHE to one that can"
        ) from error
    try:
        return ctypes.CDLL(str(folder / "library.so"))
    except OSError as error:
        raise CompilerError(f"{folder} cannot be loaded ({error}); remove it to have it compiled again") from error


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise CompilerError(f"{command[0]} failed: {reason}")
    return done.stdout
