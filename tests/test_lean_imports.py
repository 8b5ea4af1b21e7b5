"""No process imports what it does not use: how fast replicas start, and how many fit a node, is up to their imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_classifiers
from support.caches import with_libraries
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pliant.deployments import kinds
from pliant.kernels import c_compiler

TRAINING = {"transformers", "peft", "sklearn", "scipy", "matplotlib", "ortools"}
VISION = {"timm", "torchvision"}
COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
HEAVY = TRAINING | VISION | COMPILER | {"torch", "huggingface_hub"}

SERVE = "pliant.deployments"
ENCODER = (
    f"{SERVE}.encoder.replica",
    "pliant.kernels.encoder.importance_classifier",
    "pliant.kernels.encoder.eager_classifier",
)
PACKED = (
    f"{SERVE}.encoder.replica",
    "pliant.kernels.encoder.timed_runtime",
    "pliant.kernels.encoder.latency_profile",
)
KINDS = tuple(module for _, module in kinds.KINDS)
PROCESSES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "command line": (("pliant.cli.command",), HEAVY),
    "builder of the application": ((f"{SERVE}.app", f"{SERVE}.run"), HEAVY),
    "gateway": (
        (f"{SERVE}.serving.gateway", f"{SERVE}.serving.router", f"{SERVE}.http.application", *KINDS),
        HEAVY,
    ),
    "planner": ((f"{SERVE}.serving.planner", f"{SERVE}.autoscaling", *KINDS), HEAVY),
    "replica of a classifier in C": (PACKED, HEAVY),
    "replica of a classifier in torch": (ENCODER, HEAVY - {"torch"}),
    "replica of a language model": ((f"{SERVE}.llm.replica", f"{SERVE}.llm.assembly"), HEAVY - {"torch"}),
    "replica of a vision transformer": (
        (f"{SERVE}.vision.replica", "pliant.kernels.vision.executor"),
        HEAVY - {"torch"},
    ),
    "training of a text classifier": (("pliant.zoo.topics", "pliant.zoo.pairs"), HEAVY - {"torch"}),
    "training of a vision transformer": (("pliant.zoo.digits_vit",), {"transformers", "peft", "ortools"}),
}
"""By process: what it imports, and what must not come with it. timm brings all that is for vision and compiling."""


SHARED = "fastapi", "numpy", "pydantic", "ray.serve"
"""What most processes import: once for all of them, which are forks of the one that has."""
FORKS = """
import importlib, os, sys
for module in {shared!r}:
    importlib.import_module(module)
for process, modules in {processes!r}.items():
    if os.fork() == 0:
        for module in modules:
            importlib.import_module(module)
        print(process, *({heavy!r} & sys.modules.keys()), sep=",", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, process
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """What of HEAVY each process has imported."""

    def run(shared: tuple[str, ...], allowed: bool) -> dict[str, set[str]]:
        """Of processes for which torch is `allowed`, or is not."""
        processes = {name: modules for name, (modules, absent) in PROCESSES.items() if ("torch" in absent) != allowed}
        code = FORKS.format(shared=shared, processes=processes, heavy=HEAVY)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        told = [line.split(",") for line in done.stdout.splitlines()]
        return {process: set(heavy) for process, *heavy in told if process in processes}

    return run(SHARED, False) | run((*SHARED, "torch"), True)


@pytest.mark.parametrize("process", PROCESSES)
def test_what_a_process_has_no_use_for_is_not_imported(imported: dict[str, set[str]], process: str) -> None:
    _, absent = PROCESSES[process]
    assert not imported[process] & absent


def test_heavy_packages_are_seen_where_they_are_used(imported: dict[str, set[str]]) -> None:
    assert imported["replica of a classifier in torch"] == {"torch"}
    assert {"torch", "timm"} <= imported["training of a vision transformer"]


@pytest.mark.skipif(c_compiler.compiler() is None, reason="needs a C compiler")
def test_a_replica_whose_model_is_packed_answers_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(with_libraries(tmp_path / "cache")))
    folder = tiny_classifiers.save(tmp_path / "model", "bert")
    Tokenizer(WordLevel({"?": 0}, "?")).save(str(folder / "tokenizer.json"))
    config = f"EncoderConfig(kind='encoder', model={str(folder)!r}, replicas=1, lengths=[16, 60])"
    code = f"""
import sys
from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder import replica, runtimes
from pliant.kernels.encoder.texts import Text
found = runtimes.ModelRuntimes({config})
found.compile(60, lambda: 0.0)
runtime = found.load(16)
assert runtime.run_all([Text([2, 3, 4])], importance=True)[0].importance is not None
print(runtime.backend, found.device, *({HEAVY!r} & sys.modules.keys()), sep=",")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    backend, _, _, *heavy = done.stdout.strip().split(",")
    assert (backend, heavy) == ("c", [])
