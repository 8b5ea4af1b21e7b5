"""python -m pliant.bench.gpu.bundle FILE: what an image with CUDA, torch and transformers lacks to run the stage
`serving`, in one archive for a machine that reaches no package index.

Versions are those installed here. What serving does not use is left out, as a dashboard's pages and Java. There, unpack
it to a folder and name that in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

_THERE = (
    *("torch", "triton", "torchvision", "transformers", "tokenizers", "safetensors"),
    *("numpy", "scipy", "scikit-learn", "matplotlib", "pillow"),
)
"""On the image, with what they need themselves; their versions fit together."""
_UNUSED = (
    *("ortools", "peft", "pandas", "accelerate", "sympy", "networkx", "huggingface-hub"),  # not by these services
    *("virtualenv", "py-spy", "cryptography", "cffi", "pycparser", "mmh3"),  # by parts of Ray that are not
)
_UNUSED_FILES = ("ray/jars", "ray/rllib", "ray/llm", "ray/dashboard/client/build/static/js", "bin")
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)), "manylinux2014_x86_64")


def main() -> None:
    """Download, trim and pack."""
    parser = argparse.ArgumentParser(prog="python -m pliant.bench.gpu.bundle", description=__doc__)
    parser.add_argument("file", type=Path, help="receives the archive, .tar.xz")
    parser.add_argument("--python", default="3.12", help="the other machine's")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        wanted = [f"{name}=={metadata.version(name)}" for name in needed("pliant", given.python)]
        platforms = [f"--platform={name}" for name in _PLATFORMS]
        options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", f"--python-version={given.python}"]
        command = [sys.executable, "-m", "pip", "install", *options, *platforms, f"--target={site}", *wanted]
        subprocess.run(command, check=True)
        for path in _UNUSED_FILES:
            shutil.rmtree(site / path, ignore_errors=True)
        with tarfile.open(given.file, "w:xz") as archive:
            archive.add(site, ".")
    print(f"{given.file}: {given.file.stat().st_size / 1e6:.0f} MB, {len(wanted)} packages")


def needed(package: str, python: str) -> list[str]:
    """The distributions that `package` needs on an x86-64 Linux with that Python, theirs too, but for what is there
    anyway or unused; by name."""
    found: set[str] = set()
    todo = list(_requirements(package, "", python))
    while todo:
        name, extras = todo.pop()
        if name in found or name in _THERE or name in _UNUSED:
            continue
        found.add(name)
        for extra in ("", *extras):
            todo += _requirements(name, extra, python)
    return sorted(found)


def _requirements(package: str, extra: str, python: str) -> Iterable[tuple[str, set[str]]]:
    """What a distribution asks for itself, or for one of its extras: names and their extras."""
    here = {"python_version": python, "sys_platform": "linux", "platform_machine": "x86_64"}
    for line in metadata.requires(package) or ():
        requirement = Requirement(line)
        if requirement.marker is None:
            asked = not extra
        else:
            asked = requirement.marker.evaluate({**here, "extra": extra}) and ("extra" in line) == bool(extra)
        if asked:
            yield re.sub(r"[-_.]+", "-", requirement.name).lower(), requirement.extras


if __name__ == "__main__":
    main()
