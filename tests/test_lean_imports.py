"""No process imports what it does not use: how fast replicas start, and how many fit a node, is up to their imports."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """What of HEAVY each process has imported."""

    def run(process: str) -> set[str]:
        modules, _ = PROCESSES[process]
        code = f"import sys, {', '.join(modules)}\nprint('imported', *({HEAVY!r} & sys.modules.keys()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split()[1:])

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PROCESSES, pool.map(run, PROCESSES), strict=True))


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
