"""Which unit tests to run for what differs from the main branch: `python tests/changed.py` prints their files.

A test is one of them if it differs, or is named like something that does, or imports it: directly, or through other
files of the tests. What is no Python, such as a C source or cluster.yaml, counts as imported by files that name it.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "src" / "pliant"
LINKED = {folder.resolve(): folder.name for folder in PACKAGE.iterdir() if folder.is_symlink()}
"""Folders of the repository that are packages of `pliant`."""


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def changed() -> set[Path]:
    [base] = git("merge-base", "HEAD", "main")
    names = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names}


def module(path: Path) -> str:
    """How Python imports the file."""
    for folder, package in LINKED.items():
        if path.is_relative_to(folder):
            path = PACKAGE / package / path.relative_to(folder)
    top = PACKAGE.parent if path.is_relative_to(PACKAGE) else TESTS if path.is_relative_to(TESTS) else ROOT
    return ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def affected(files: set[Path]) -> list[Path]:
    """The unit tests that `files` concern."""
    python = {path for path in files if path.suffix == ".py"}
    named = {path.name for path in files - python}
    sources = [ROOT / name for name in git("ls-files", "*.py") if (ROOT / name).is_file()]
    python |= {path for path in sources if any(name in path.read_text() for name in named)}
    modules = {module(path) for path in python}
    names = {f"test_{path.name}" for path in python}
    tests = [path for path in TESTS.rglob("*.py") if not path.is_relative_to(TESTS / "e2e")]
    found: set[Path] = set()
    while more := {path for path in tests if path in python or modules & {*imports(path)}} - found:
        found |= more
        modules |= {module(path) for path in more}
    return sorted(path for path in tests if path.name.startswith("test_") and (path in found or path.name in names))


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in affected(changed())), sep="\n")
