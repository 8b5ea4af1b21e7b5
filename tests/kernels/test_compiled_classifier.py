"""A compiled classifier answers what the eager model answers, and loads without its compiler."""

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pliant.errors import ModelError
from pliant.kernels import compiled_classifier
from pliant.kernels.compiled_classifier import TOLERANCE, Runtime, load, prepare
from pliant.kernels.eager_classifier import EagerClassifier
from pliant.kernels.runtime_cache import RuntimeSpec, package_folder
from pliant.torchvision_mend import mend

VOCABULARY, LABELS = 99, 3
CASES = [
    ("bert", 24, "float32", "static"),
    ("bert", 24, "bfloat16", "static"),
    ("roberta", 17, "float32", "static"),
    ("distilbert", 40, "float32", "static"),
    ("roberta", 17, "float32", "dynamic"),
    ("bert", 24, "float32", "dynamic"),
]

requires_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny untrained classifiers by name, in folders with a space in their path."""
    mend()
    import transformers as hf

    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    distilbert = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 80, "num_labels": LABELS, "initializer_range": 0.3}
    torch.manual_seed(0)
    models = {
        "bert": hf.BertForSequenceClassification(hf.BertConfig(**bert, **common)),
        "roberta": hf.RobertaForSequenceClassification(hf.RobertaConfig(**bert, **common)),
        "distilbert": hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**distilbert, **common)),
        "headless": hf.BertModel(hf.BertConfig(**bert, **common)),
    }
    root = tmp_path_factory.mktemp("tiny models")
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(cache))
    compiled_classifier._warn_once.cache_clear()


@pytest.fixture(scope="session")
def runtimes(folders: dict[str, Path], cache: Path) -> dict[tuple[str, int, str, str], Runtime]:
    """The runtimes of CASES, compiled two at a time."""

    def compiled(case: tuple[str, int, str, str]) -> Runtime:
        name, max_length, dtype, shape = case
        return load(folders[name], max_length, dtype=dtype, dynamic=shape == "dynamic")

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("PLIANT_CACHE", str(cache))
        return dict(zip(CASES, pool.map(compiled, CASES), strict=True))


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
    model = EagerClassifier(folder, device=device, dtype=dtype)
    for ids in texts(runtime.max_length):
        expected = model(torch.from_numpy(np.stack([ids, np.ones_like(ids)])).to(device)).cpu().numpy()
        answer = runtime(ids)
        assert answer.shape == (LABELS,)
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer, expected, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(expected).max()))


@requires_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_answers_as_the_unpadded_eager_model(runtimes, folders, case) -> None:
    name, max_length, dtype, shape = case
    runtime = runtimes[case]
    assert (runtime.backend, runtime.max_length, runtime.dynamic) == ("aoti", max_length, shape == "dynamic")
    assert_answers_as_eager(runtime, folders[name], dtype)


@requires_compiler
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=["static", "dynamic"])
def test_takes_lists_and_keeps_earlier_answers(runtimes, case) -> None:
    runtime = runtimes[case]
    first = runtime([5, 6, 7])
    kept = first.copy()
    runtime(np.full(24, 9))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(runtime(np.array([5, 6, 7])), kept)


@requires_compiler
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=["static", "dynamic"])
def test_refuses_wrong_lengths_and_unknown_tokens(runtimes, case) -> None:
    runtime = runtimes[case]
    with pytest.raises(ValueError, match="got 0 token ids; this runtime takes 1 to 24"):
        runtime([])
    with pytest.raises(ValueError, match="got 25 token ids"):
        runtime(np.ones(25, np.int64))
    for ids in ([1, -1], [1, VOCABULARY]):
        with pytest.raises(ValueError, match="must lie in 0 to 98"):
            runtime(ids)


@requires_compiler
def test_a_dynamic_runtime_computes_no_padding(runtimes, monkeypatch) -> None:
    runtime, widths = runtimes[CASES[-1]], []
    forward = runtime._forward
    monkeypatch.setattr(runtime, "_forward", lambda inputs: widths.append(inputs.shape[1]) or forward(inputs))
    for length in (24, 1, 2, 3, 17):
        runtime(np.full(length, 5))
    assert widths == [24, 2, 2, 3, 17]


@requires_compiler
def test_preparing_compiles_what_loading_takes(folders, monkeypatch, tmp_path) -> None:
    compiled: list[RuntimeSpec] = []

    def compile_apart(spec: RuntimeSpec, into: Path) -> None:
        compiled.append(spec)

    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled_classifier, "_compile_apart", compile_apart)
    for _ in range(2):
        prepare(folders["bert"], 9, threads=2, dynamic=True)
    (spec,) = compiled
    assert spec == RuntimeSpec(folders["bert"], 9, threads=2, dynamic=True)
    assert package_folder(spec).is_dir()


@requires_compiler
def test_a_cached_runtime_needs_neither_compiler_nor_transformers(runtimes, folders, tmp_path) -> None:
    code = """
import sys
from pathlib import Path
from pliant.kernels.compiled_classifier import load
runtime = load(Path(sys.argv[1]), 24)
print(runtime.backend, "transformers" in sys.modules, "torch._inductor" in sys.modules)
"""
    environment = os.environ | {"PATH": str(tmp_path), "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, folders["bert"]], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["aoti", "False", "False"], done.stderr


@pytest.mark.usefixtures("without_compiler")
def test_without_compiler_warns_once_and_answers_the_same(folders, caplog) -> None:
    with caplog.at_level(logging.WARNING, "pliant"):
        runtimes = [load(folders["roberta"], max_length) for max_length in (9, 33)]
    (record,) = caplog.records
    assert "No C++ compiler" in record.message
    assert "install" in record.message
    for runtime in runtimes:
        assert runtime.backend == "eager"
        assert_answers_as_eager(runtime, folders["roberta"])
        with pytest.raises(ValueError, match="got 0 token ids"):
            runtime([])


def test_a_failed_compile_leaves_nothing_and_says_why(folders, caplog, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    with caplog.at_level(logging.WARNING, "pliant"):
        runtime = load(folders["bert"], 11)
    assert "InvalidCxxCompiler" in caplog.text
    assert not [path for path in (tmp_path / "runtimes").glob("bert-*") if path.is_dir()]
    assert_answers_as_eager(runtime, folders["bert"])


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("bert", {"max_length": 0}, "choose 1 to 80"),
        ("bert", {"max_length": 81}, "choose 1 to 80"),
        ("bert", {"max_length": 2, "dynamic": True}, "choose 3 to 80"),
        ("roberta", {"max_length": 79}, "choose 1 to 78"),
        ("bert", {"max_length": 8, "device": "tpu"}, "choose cpu or cuda"),
        ("bert", {"max_length": 8, "dtype": "int4"}, "choose float32 or bfloat16"),
        ("bert", {"max_length": 8, "threads": 0}, "choose 1 or more"),
        ("headless", {"max_length": 8}, "classifier.weight"),
    ],
)
def test_refuses_what_it_cannot_serve(folders, name, arguments, reason) -> None:
    with pytest.raises(ModelError, match=reason):
        load(folders[name], **arguments)


def test_refuses_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path, 8)


@requires_gpu
def test_gpu_dynamic_answers_as_the_unpadded_eager_model(folders) -> None:
    runtime = load(folders["bert"], 24, device="cuda", dynamic=True)
    assert (runtime.backend, runtime.dynamic) == ("aoti", True)
    assert_answers_as_eager(runtime, folders["bert"], device="cuda")


@requires_gpu
@pytest.mark.parametrize("compiler", ["g++", "none"])
def test_gpu_answers_as_the_unpadded_eager_model(folders, compiler, monkeypatch, tmp_path) -> None:
    if compiler == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    runtime = load(folders["bert"], 24, device="cuda")
    assert runtime.backend == "cuda-graph"
    assert_answers_as_eager(runtime, folders["bert"], device="cuda")
