"""Imports run one way, and each folder keeps to its own libraries (docs/architecture.md, "Folders").

What is not true yet stands in WAITS, which may only shrink.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SPINE = "spine"
"""What lies in src/pliant itself."""
LINKED = ("policies", "kernels", "simulation", "deployments", "bench")
"""Top-level folders that are packages of `pliant`, by links."""

MAY_IMPORT: dict[str, set[str]] = {
    SPINE: set(),
    "policies": {SPINE},
    "kernels": {SPINE},
    "simulation": {SPINE, "policies"},
    "deployments": {SPINE, "policies", "kernels", "simulation"},
    "bench": {SPINE, "policies", "kernels", "simulation", "deployments"},
}
"""Of the other folders. Commands (`pliant.cli`) put together all but bench."""
NOT_FOR: dict[str, set[str]] = {
    SPINE: {"ray"},
    "policies": {"ray", "torch", "transformers", "asyncio", "threading", "time"},
    "kernels": {"ray", "asyncio"},
    "simulation": {"ray", "torch", "transformers", "asyncio", "threading", "time"},
    "deployments": {"ray"},
    "bench": set(),
}
"""Libraries that a folder does without."""
MAY_IMPORT_RAY = {
    "deployments.app",
    "deployments.drain",
    "deployments.nodes",
    "deployments.own_version",
    "deployments.ray_client",
    "deployments.ray_start",
    "deployments.run",
    "deployments.serve_file",
    "deployments.startup",
    *(f"deployments.serving.{shell}" for shell in ("calls", "gateway", "listening", "metrics", "planner", "router")),
    *(f"deployments.{kind}.replica" for kind in ("encoder", "llm", "vision")),
}

WAITS: dict[str, set[str]] = {
    "deployments.http.openai_answers": {"deployments.llm.request", "deployments.llm.token_texts"},
    "deployments.http.resumption": {"deployments.llm.request"},
}
"""Modules -> modules that they import although they should not; shorter with every change."""


class Module(NamedTuple):
    """`pliant.deployments.llm.engine` is `Module("deployments", "llm", "engine")`, `pliant.cache` is in the spine."""

    folder: str
    package: str
    """Below the folder; "" for what lies in the folder itself."""
    name: str
    """The rest, with dots; "" for a package."""

    def __str__(self) -> str:
        return ".".join(filter(None, (self.folder if self.folder != SPINE else "", self.package, self.name)))


def of(dotted: str) -> Module:
    """Of the name that Python imports."""
    _, *parts = dotted.split(".")
    folder = parts.pop(0) if parts and parts[0] in LINKED else SPINE
    base = ROOT / (folder if folder != SPINE else "src/pliant")
    package = parts.pop(0) if parts and (base / parts[0]).is_dir() else ""
    return Module(folder, package, ".".join(parts))


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the distribution: the name that Python imports it by, and its file."""
    for folder in (ROOT / "src" / "pliant", *(ROOT / name for name in LINKED)):
        above = folder.parent if folder.parent == ROOT / "src" else ROOT
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(above).with_suffix("").parts
            yield ".".join(("pliant",) * (above == ROOT) + parts).removesuffix(".__init__"), path


FILES = dict(sources())
EMPTY = ROOT / "kernels" / "__init__.py"
KINDS = {of(name).package for name in FILES if of(name).folder == "deployments"} - {"", "serving", "http"}
"""A folder of deployments that neither all kinds share nor all protocols is a kind's."""
KIND_OF = {**{kind: kind for kind in KINDS}, "decoder": "llm"}
"""By package, in whatever folder."""
KINDS_OF_OTHERS = {"cascade": {"encoder"}, "llm_cascade": {"llm", "cascade"}}
"""A cascade's levels are services of text classifiers, or of language models; both promise alike."""


def named(node: ast.AST) -> Iterator[str]:
    """What an import names: modules, and what is in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(path: Path) -> Iterator[str]:
    """Wherever they stand, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        yield from named(node)


def imports_at_once(tree: ast.AST) -> Iterator[str]:
    """Those that come with the module's own import, or that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        yield from named(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_once(node)


def modules(names: Iterator[str]) -> set[str]:
    """Our modules that are named, or that hold what is."""
    found = (name if name in FILES else name.rpartition(".")[0] for name in names)
    return {name for name in found if name in FILES}


def allowed(importer: Module, imported: Module) -> bool:
    """Whether the folders' order and the kinds' lets the one import the other."""
    if importer.folder == "bench":
        return True
    if importer.folder == SPINE and importer.package == "cli":
        return imported.folder != "bench"
    if imported.folder != importer.folder and imported.folder not in MAY_IMPORT[importer.folder]:
        return False
    if importer.folder == imported.folder == "deployments" and importer.package == "serving":
        return imported.package in ("", "serving")
    own, other = KIND_OF.get(importer.package), KIND_OF.get(imported.package)
    if other is None or own == other:
        return True
    if own is None:  # what kinds share names none; what lies in a folder itself may, if it puts kinds together
        return importer.folder in ("deployments", "simulation") and not importer.package
    return other in KINDS_OF_OTHERS.get(own, ())


def test_imports_run_one_way() -> None:
    broken: dict[str, set[str]] = {}
    for name, path in FILES.items():
        wrong = {str(of(other)) for other in modules(imports(path)) if not allowed(of(name), of(other))}
        if wrong:
            broken[str(of(name))] = wrong
    new = {name: wrong - WAITS.get(name, set()) for name, wrong in broken.items()}
    gone = {name: waits - broken.get(name, set()) for name, waits in WAITS.items()}
    assert not any(new.values()), f"not allowed: {[(name, *wrong) for name, wrong in new.items() if wrong]}"
    assert not any(gone.values()), f"strike off WAITS: {[(name, *waits) for name, waits in gone.items() if waits]}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {name: modules(imports_at_once(ast.parse(path.read_text()))) - {name} for name, path in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_folders_keep_to_their_libraries() -> None:
    for name, path in FILES.items():
        module = of(name)
        libraries = {imported.partition(".")[0] for imported in imports(path)}
        wrong = libraries & NOT_FOR[module.folder] - ({"ray"} if str(module) in MAY_IMPORT_RAY else set())
        assert not wrong, f"{module} imports {wrong}"
        assert not libraries & {*LINKED}, f"{module} imports one of our folders by another name than pliant's"


def test_nobody_may_import_ray_who_is_not_there() -> None:
    assert {str(of(name)) for name in FILES} >= MAY_IMPORT_RAY


def test_the_kernels_package_stays_empty() -> None:
    """transformers imports any top-level module of that name that it finds in the working directory."""
    assert not EMPTY.read_text()


EVERYTHING = """
import importlib, os, sys
from collections import Counter
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        assert not missing.name.startswith("pliant"), missing
loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
files = [os.path.realpath(file) for file in loaded if file]
ours = Counter(file for file in files if file.startswith(sys.argv[1]) and "site-packages" not in file)
print(len(ours), *(file for file, names in ours.items() if names > 1))
"""
"""Not all libraries of the benchmarks and of GPUs need be there."""


def test_no_module_is_loaded_under_two_names() -> None:
    """The folders have links in src/pliant, and Python, started here, could find them without `pliant` as well."""
    apart = ("pliant.lean_worker", "pliant.deployments.run", *(name for name in FILES if name.endswith("__main__")))
    names = [name for name in FILES if name not in apart]
    command = [sys.executable, "-c", EVERYTHING, f"{ROOT}{os.sep}", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, *twice = done.stdout.split("\n")[-2].split()
    assert {*twice} <= {str(EMPTY)}
    assert int(count) > 0.9 * len(names)
