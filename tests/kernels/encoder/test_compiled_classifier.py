"""A compiled classifier answers what the eager model answers, and loads without its compiler."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support import tiny_classifiers
from support.compiled_cases import CASES, HALF, STATIC, TELLING, TOGETHER
from support.tiny_classifiers import LABELS, VOCABULARY

from pliant.errors import ModelError
from pliant.kernels.encoder import compiled_classifier
from pliant.kernels.encoder.compiled_classifier import TOLERANCE, Runtime, is_prepared, load, prepare
from pliant.kernels.encoder.eager_classifier import EagerClassifier
from pliant.kernels.encoder.texts import Text
from pliant.kernels.runtime_cache import RuntimeSpec, package_folder

requires_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _environment(runtimes_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(runtimes_cache))
    compiled_classifier._warn_once.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def texts(max_length: int) -> list[np.ndarray]:
    """Random token ids (no pad token) of every length from 1 to max_length, long and short by turns."""
    rng = np.random.default_rng(max_length)
    lengths = rng.permutation(np.arange(1, max_length + 1))
    return [rng.integers(2, VOCABULARY, length) for length in lengths]


def assert_answers_as_eager(runtime: Runtime, folder: Path, dtype: str = "float32", device: str = "cpu") -> None:
    model = EagerClassifier(folder, device=device, dtype=dtype, importance=runtime.importance)
    for ids in texts(runtime.max_length):
        expected = model.unpadded(torch.from_numpy(ids).to(device)).cpu().numpy()
        answer = runtime.run(ids)
        assert answer.logits.shape == (LABELS,)
        assert answer.logits.dtype == np.float32
        assert_close(answer.logits, expected[:LABELS], dtype)
        assert (answer.importance is not None) == runtime.importance
        if answer.importance is not None:
            assert_close(answer.importance, expected[LABELS:], dtype)


def assert_close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(expected).max()))


@requires_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_answers_as_the_unpadded_eager_model(runtimes, classifier, case) -> None:
    runtime = runtimes[case]
    assert (runtime.backend, runtime.max_length, runtime.dynamic) == ("aoti", case.max_length, case.dynamic)
    assert runtime.importance == case.importance
    assert_answers_as_eager(runtime, classifier(case.kind), case.dtype)


@requires_compiler
@pytest.mark.parametrize("case", [STATIC, HALF], ids=["static", "dynamic"])
def test_takes_lists_and_keeps_earlier_answers(runtimes, case) -> None:
    runtime = runtimes[case]
    first = runtime([5, 6, 7])
    kept = first.copy()
    runtime(np.full(case.max_length, 9))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(runtime(np.array([5, 6, 7])), kept)


@requires_compiler
@pytest.mark.parametrize("case", [STATIC, HALF], ids=["static", "dynamic"])
def test_refuses_wrong_lengths_and_unknown_tokens(runtimes, case) -> None:
    runtime = runtimes[case]
    with pytest.raises(ValueError, match=f"got 0 token ids; this runtime takes 1 to {case.max_length}"):
        runtime([])
    with pytest.raises(ValueError, match=f"got {case.max_length + 1} token ids"):
        runtime(np.ones(case.max_length + 1, np.int64))
    for ids in ([1, -1], [1, VOCABULARY]):
        with pytest.raises(ValueError, match="must lie in 0 to 98"):
            runtime(ids)


def pairs(count: int, max_length: int) -> list[Text]:
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, max_length + 1, count)
    return [Text(rng.integers(2, VOCABULARY, length), rng.integers(0, 2, length)) for length in lengths]


def assert_answers_together(runtime: Runtime, folder: Path) -> None:
    model = EagerClassifier(folder, device="cpu", dtype="float32")
    for count in range(1, runtime.batch + 1):
        given = pairs(count, runtime.max_length)
        for text, output in zip(given, runtime.run_all(given), strict=True):
            ids, types = (torch.from_numpy(np.asarray(each)) for each in (text.ids, text.types))
            assert_close(output.logits, model.unpadded(ids, types).numpy(), "float32")
    with pytest.raises(ValueError, match=f"got {runtime.batch + 1} texts; this runtime takes 1 to {runtime.batch}"):
        runtime.run_all(pairs(runtime.batch + 1, runtime.max_length))
    with pytest.raises(ValueError, match="a token type from 0 to 1 for each token"):
        runtime([5, 6], [0, 2])


@requires_compiler
def test_compiled_pairs_of_a_batch_are_answered_as_alone(runtimes, classifier) -> None:
    assert runtimes[TOGETHER].batch == TOGETHER.batch
    assert_answers_together(runtimes[TOGETHER], classifier(TOGETHER.kind))


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_uncompiled_pairs_of_a_batch_are_answered_as_alone(classifier, kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    assert_answers_together(load(classifier(kind), 24, batch=5, compiling=False), classifier(kind))


@requires_compiler
def test_a_dynamic_runtime_computes_no_padding(runtimes, monkeypatch) -> None:
    runtime, widths = runtimes[TELLING], []
    forward = runtime._forward
    monkeypatch.setattr(runtime, "_forward", lambda inputs: widths.append(inputs.shape[2]) or forward(inputs))
    for length in (24, 1, 2, 3, 17):
        runtime(np.full(length, 5))
    assert widths == [24, 2, 2, 3, 17]


@requires_compiler
def test_preparing_compiles_what_loading_takes(classifier, monkeypatch, tmp_path) -> None:
    compiled: list[RuntimeSpec] = []

    def compile_apart(spec: RuntimeSpec, urgency: Callable[[], float], into: Path) -> None:
        assert urgency() == 3.0
        compiled.append(spec)

    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled_classifier, "_compile_apart", compile_apart)
    assert not is_prepared(classifier("bert"), 9, threads=2, dynamic=True)
    assert load(classifier("bert"), 9, threads=2, dynamic=True, compiling=False).backend == "eager"
    for _ in range(2):
        prepare(classifier("bert"), 9, lambda: 3.0, threads=2, dynamic=True)
        assert is_prepared(classifier("bert"), 9, threads=2, dynamic=True)
    (spec,) = compiled
    assert spec == RuntimeSpec(classifier("bert"), 9, threads=2, dynamic=True)
    assert package_folder(spec).is_dir()


@requires_compiler
def test_a_cached_runtime_needs_neither_compiler_nor_transformers(runtimes, classifier, tmp_path) -> None:
    code = """
import sys
from collections.abc import Callable
from pathlib import Path
from pliant.kernels.encoder.compiled_classifier import load
runtime = load(Path(sys.argv[1]), 17)
print(runtime.backend, "transformers" in sys.modules, "torch._inductor" in sys.modules)
"""
    environment = os.environ | {"PATH": str(tmp_path), "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, classifier(STATIC.kind)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["aoti", "False", "False"], done.stderr


@pytest.mark.usefixtures("without_compiler")
def test_without_compiler_warns_once_and_answers_the_same(classifier, caplog) -> None:
    with caplog.at_level(logging.WARNING, "pliant"):
        runtimes = [load(classifier("roberta"), max_length) for max_length in (9, 33)]
    (record,) = caplog.records
    assert "No C++ compiler" in record.message
    assert "install" in record.message
    for runtime in runtimes:
        assert runtime.backend == "eager"
        assert_answers_as_eager(runtime, classifier("roberta"))
        with pytest.raises(ValueError, match="got 0 token ids"):
            runtime([])


def test_a_failed_compile_leaves_nothing_and_says_why(classifier, caplog, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    with caplog.at_level(logging.WARNING, "pliant"):
        runtime = load(classifier("bert"), 11)
    assert "InvalidCxxCompiler" in caplog.text
    assert not [path for path in (tmp_path / "runtimes").glob("bert-*") if path.is_dir()]
    assert_answers_as_eager(runtime, classifier("bert"))


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("bert", {"max_length": 0}, "choose 1 to 128"),
        ("bert", {"max_length": 129}, "choose 1 to 128"),
        ("bert", {"max_length": 2, "dynamic": True}, "choose 3 to 128"),
        ("roberta", {"max_length": 127}, "choose 1 to 126"),
        ("bert", {"max_length": 8, "device": "tpu"}, "choose cpu or cuda"),
        ("bert", {"max_length": 8, "dtype": "int4"}, "choose float32 or bfloat16"),
        ("bert", {"max_length": 8, "threads": 0}, "choose 1 or more"),
    ],
)
def test_refuses_what_it_cannot_serve(classifier, name, arguments, reason) -> None:
    with pytest.raises(ModelError, match=reason):
        load(classifier(name), **arguments)


@pytest.mark.usefixtures("without_compiler")
def test_refuses_weights_of_layers_that_nobody_reads(classifier, tmp_path) -> None:
    """Of relative positions, for example, which transformers has no more."""
    config = json.loads((classifier("bert") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": "relative_key"}))
    weights = safetensors.torch.load_file(classifier("bert") / "model.safetensors")
    distances = "bert.encoder.layer.0.attention.self.distance_embedding.weight"
    safetensors.torch.save_file(
        {**weights, distances: torch.ones(9, 8)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ModelError, match=f"transformers does not read what its layers have: {distances}"):
        load(tmp_path, 8)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_refuses_a_classifier_without_its_head(classifier, kind, tmp_path) -> None:
    tiny_classifiers.read(classifier(kind)).base_model.save_pretrained(tmp_path / kind)
    shutil.copy(classifier(kind) / "config.json", tmp_path / kind)
    with pytest.raises(
        ModelError, match=r"is no trained encoder for its task: it has no weights for .*classifier\.wei"
    ):
        load(tmp_path / kind, 8)


def test_refuses_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path, 8)


class Recorded:
    """Stands in for a CUDA graph: what would be recorded runs as it comes, or cannot be recorded."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> None:
        if example.shape[2] > 20:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._forward = forward

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._forward(inputs).clone()


@pytest.mark.parametrize(("max_length", "backend"), [(20, "cuda-graph"), (24, "eager")])
def test_on_a_gpu_it_is_recorded_and_nothing_compiled(classifier, caplog, monkeypatch, max_length, backend) -> None:
    ones, made, run = torch.ones, EagerClassifier.__init__, compiled_classifier._run_eagerly
    on_cpu = lambda self, folder, device, **options: made(self, folder, device="cpu", **options)  # noqa: E731
    monkeypatch.setattr(EagerClassifier, "__init__", on_cpu)
    monkeypatch.setattr(compiled_classifier, "CudaGraph", Recorded)
    monkeypatch.setattr(compiled_classifier, "_run_eagerly", lambda model, _, inputs: run(model, "cpu", inputs))
    monkeypatch.setattr(torch, "ones", lambda *size, pin_memory=False, **options: ones(*size, **options))
    assert compiled_classifier.is_prepared(classifier("bert"), max_length, device="cuda")
    runtime = load(classifier("bert"), max_length, device="cuda")
    assert runtime.backend == backend
    assert ("cannot be recorded" in caplog.text) == (backend == "eager")
    assert_answers_as_eager(runtime, classifier("bert"))


@requires_gpu
def test_gpu_dynamic_answers_as_the_unpadded_eager_model(classifier) -> None:
    runtime = load(classifier("bert"), 24, device="cuda", dynamic=True)
    assert (runtime.backend, runtime.dynamic) == ("eager", True)
    assert_answers_as_eager(runtime, classifier("bert"), device="cuda")


@requires_gpu
def test_gpu_answers_as_the_unpadded_eager_model(classifier) -> None:
    runtime = load(classifier("bert"), 24, device="cuda")
    assert runtime.backend == "cuda-graph"
    assert_answers_as_eager(runtime, classifier("bert"), device="cuda")
