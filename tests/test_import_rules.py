"""Imports run one way, and each folder keeps to its own libraries (docs/architecture.md, "Folders")."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "pliant": ROOT / "src" / "pliant",
    "policies": ROOT / "policies",
    "kernels": ROOT / "kernels",
    "deployments": ROOT / "deployments",
    "bench": ROOT / "bench",
}
FORBIDDEN = {
    "pliant": {"ray", "pliant.policies", "pliant.kernels", "pliant.deployments", "pliant.bench"},
    "policies": {"torch", "transformers", "ray", "time", "pliant.kernels", "pliant.deployments", "pliant.bench"},
    "kernels": {"ray", "asyncio", "pliant.policies", "pliant.deployments", "pliant.bench"},
    "deployments": {"pliant.bench"},
    "bench": set(),
}
"""Commands may import all but ray: they are put together from everything else."""
COMMANDS = {"pliant/cli/command.py", "pliant/cli/vision.py", "pliant/cli/cascade.py"}
MAY_IMPORT_RAY = {
    "deployments/app.py",
    "deployments/run.py",
    "deployments/startup.py",
    "deployments/serving/gateway.py",
    "deployments/serving/metrics.py",
    "deployments/serving/planner.py",
    "deployments/serving/router.py",
    *(f"deployments/{kind}/{shell}.py" for kind in ("encoder", "llm", "vision") for shell in ("replica", "router")),
}


def modules() -> Iterator[tuple[str, Path]]:
    for folder, path in FOLDERS.items():
        for module in sorted(path.rglob("*.py")):
            yield folder, module


def imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize(("folder", "module"), [pytest.param(*item, id=str(item[1])) for item in modules()])
def test_imports_keep_to_the_rules(folder: str, module: Path) -> None:
    path = f"{folder}/{module.relative_to(FOLDERS[folder]).as_posix()}"
    forbidden = set(FORBIDDEN[folder])
    if folder == "deployments" and path not in MAY_IMPORT_RAY:
        forbidden.add("ray")
    if path in COMMANDS:
        forbidden = {"ray"}
    for name in imports(module):
        broken = [package for package in forbidden if inside(name, package)]
        assert not broken, f"{path} imports {name}"


@pytest.mark.parametrize("folder", ["policies", "kernels", "deployments", "bench"])
def test_folders_are_imported_only_as_part_of_the_distribution(folder: str) -> None:
    for _, module in modules():
        assert not any(inside(name, folder) for name in imports(module)), module


def test_the_kernels_package_stays_empty() -> None:
    """transformers imports any top-level module of that name that it finds in the working directory."""
    assert not (ROOT / "kernels" / "__init__.py").read_text()
