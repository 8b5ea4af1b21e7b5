"""Importance is what transformers' own attention weights add up to, however a model computes and texts are padded."""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny_classifiers
from support.compiled_cases import TELLING
from support.tiny_classifiers import HEADS, LABELS, LAYERS, VOCABULARY

from pliant.errors import ModelError
from pliant.kernels.encoder import compiled_classifier, importance_classifier
from pliant.kernels.encoder.compiled_classifier import Runtime, load
from pliant.kernels.encoder.eager_classifier import EagerClassifier
from pliant.kernels.encoder.importance import received
from pliant.kernels.encoder.importance_classifier import FUSED, ImportanceRuntime
from pliant.kernels.runtime_cache import RuntimeSpec

ARCHITECTURES = ["albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta"]
TOLERANCE = 1e-4
LENGTHS = (1, 2, 7, 24)

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path_factory.getbasetemp() / "importance"))
    compiled_classifier._warn_once.cache_clear()


def text(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(2, VOCABULARY, length)


read = functools.cache(tiny_classifiers.read)


def expected(folder: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and importance of an unpadded text by transformers alone."""
    model = read(folder)
    with torch.inference_mode():
        output = model(torch.from_numpy(ids)[None], output_attentions=True)
    importance = np.zeros(len(ids))
    for layer in output.attentions:
        for head in layer[0].double().numpy():
            for row in head:
                importance += row
    assert len(output.attentions) == LAYERS
    return output.logits[0].numpy(), importance


def assert_right(runtime: Runtime, folder: Path, atol: float = TOLERANCE) -> None:
    for length in (*LENGTHS, 13):
        logits, importance = expected(folder, text(length))
        output = runtime.run(text(length))
        assert output.importance is not None
        np.testing.assert_allclose(output.logits, logits, atol=atol)
        np.testing.assert_allclose(output.importance, importance, atol=atol * LAYERS * HEADS * length)
        np.testing.assert_array_equal(runtime(text(length)), output.logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_eager_importance_is_the_sum_of_attention_weights(classifier, architecture) -> None:
    folder = classifier(architecture)
    model = EagerClassifier(folder, device="cpu", dtype="float32", importance=True)
    for length in LENGTHS:
        logits, importance = expected(folder, text(length))
        assert importance.sum() == pytest.approx(LAYERS * HEADS * length, rel=1e-4)
        for padding in (0, 1, 9):
            ids = np.concatenate([text(length), np.full(padding, model.facts["pad"])])
            mask = np.arange(length + padding) < length
            found = model(torch.from_numpy(np.stack([ids, mask]))[:, None])[0].numpy()
            np.testing.assert_allclose(found[:LABELS], logits, atol=TOLERANCE)
            np.testing.assert_allclose(found[LABELS : LABELS + length], importance, atol=TOLERANCE * length)
            assert not found[LABELS + length :].any()


@pytest.mark.parametrize("architecture", ["bert", "roberta", "mpnet"])
@pytest.mark.parametrize("lengths", [(5,), (3, 3), (1, 24, 8, 2)], ids=str)
def test_texts_of_a_batch_do_not_touch_each_other(classifier, architecture, lengths) -> None:
    model = EagerClassifier(classifier(architecture), device="cpu", dtype="float32", importance=True).model
    mask = torch.tensor(np.arange(max(lengths)) < np.array(lengths)[:, None]).long()
    ids = torch.full_like(mask, 1)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.from_numpy(text(length))
    for row, length in zip(model.padded(ids, mask, importance=True)[:, LABELS:].numpy(), lengths, strict=True):
        _, importance = expected(classifier(architecture), text(length))
        np.testing.assert_allclose(row[:length], importance, atol=TOLERANCE * length)
        assert not row[length:].any()


def test_half_precision_adds_up_in_full() -> None:
    weights = torch.full((1, 16, 300, 300), 1 / 300, dtype=torch.bfloat16)
    total = received([weights] * 12, torch.ones(1, 300, dtype=torch.int64))
    assert total.dtype == torch.float32
    np.testing.assert_allclose(total[0].numpy(), 12 * 16 * 300 * weights[0, 0, 0, 0].item(), rtol=1e-5)


class Counted:
    """The eager model as a runtime, that counts its passes."""

    def __init__(self, folder: Path, max_length: int, importance: bool) -> None:
        self._model = EagerClassifier(folder, device="cpu", dtype="float32", importance=importance)
        self.runtime = Runtime(self._pass, "eager", max_length, importance=importance, **self._model.facts)
        self.passes = 0

    def _pass(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        found: torch.Tensor = self._model(inputs)
        return found


@pytest.mark.parametrize("length", [1, FUSED, FUSED + 1, 100])
@pytest.mark.parametrize("wanted", [False, True])
def test_long_texts_are_read_twice_if_their_importance_is_wanted_and_no_others(classifier, length, wanted) -> None:
    plain, stepwise = (Counted(classifier("roberta"), 100, importance) for importance in (False, True))
    runtime = ImportanceRuntime(plain.runtime, stepwise.runtime)
    logits, importance = expected(classifier("roberta"), text(length))
    asked: list[np.ndarray] = []
    told = runtime.with_importance(text(length), None, lambda said: bool(asked.append(said)) or wanted)
    np.testing.assert_allclose(told.logits, logits, atol=TOLERANCE)
    np.testing.assert_array_equal(asked, [told.logits])
    if wanted:
        assert told.importance is not None
        np.testing.assert_allclose(told.importance, importance, atol=TOLERANCE * LAYERS * HEADS * length)
    else:
        assert told.importance is None
    short = length <= FUSED
    assert (plain.passes, stepwise.passes) == ((0, 1) if short else (1, int(wanted)))
    assert (told.importance_s > 0) == (wanted and not short)
    np.testing.assert_array_equal(runtime(text(length)), told.logits)


@pytest.mark.parametrize("length", [FUSED, FUSED + 1])
def test_types_of_pairs_count(classifier, length) -> None:
    folder, ids = classifier("bert"), text(length)
    types = np.arange(length) % 2
    plain, stepwise = (Counted(folder, 100, importance).runtime for importance in (False, True))
    told = ImportanceRuntime(plain, stepwise).with_importance(ids, types, lambda _: True)
    model = EagerClassifier(folder, device="cpu", dtype="float32", importance=True)
    expected = model.unpadded(torch.from_numpy(ids), torch.from_numpy(types)).numpy()
    np.testing.assert_allclose(told.logits, expected[:LABELS], atol=TOLERANCE)
    assert told.importance is not None
    np.testing.assert_allclose(told.importance, expected[LABELS:], atol=TOLERANCE * LAYERS * HEADS * length)
    assert not np.allclose(told.logits, model.unpadded(torch.from_numpy(ids)).numpy()[:LABELS], atol=TOLERANCE)


def test_a_runtime_for_short_texts_holds_one_package(classifier, monkeypatch) -> None:
    made: list[tuple[int, bool]] = []

    def load(folder: Path, max_length: int, importance: bool = False) -> Runtime:
        made.append((max_length, importance))
        return Counted(folder, max_length, importance).runtime

    monkeypatch.setattr(importance_classifier.compiled_classifier, "load", load)
    monkeypatch.setattr(importance_classifier.compiled_classifier, "prepare", load)
    for do in (importance_classifier.prepare, importance_classifier.load):
        made.clear()
        do(classifier("bert"), FUSED)
        do(classifier("bert"), FUSED + 1)
        assert made == [(FUSED, True), (FUSED + 1, False), (FUSED + 1, True)]
    runtime = importance_classifier.load(classifier("bert"), FUSED)
    assert (runtime.max_length, runtime.backend, runtime.dynamic) == (FUSED, "eager", True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiled_runtime_gives_importance_in_the_same_pass(runtimes, classifier) -> None:
    assert_right(runtimes[TELLING], classifier(TELLING.kind))


def test_a_static_runtime_gives_that_of_the_text_without_its_padding(classifier) -> None:
    model = EagerClassifier(classifier("roberta"), device="cpu", dtype="float32", importance=True)
    runtime = Runtime(model, "aoti", 24, importance=True, **model.facts)
    assert_right(runtime, classifier("roberta"))
    first = runtime.run(text(5)).importance
    assert first is not None
    kept = first.copy()
    runtime.run(text(24))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("architecture", ["roberta", "deberta-v2"])
def test_without_compiler_the_eager_model_gives_it(classifier, architecture, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    runtime = load(classifier(architecture), 24, importance=True)
    assert runtime.backend == "eager"
    assert_right(runtime, classifier(architecture))
    plain = load(classifier(architecture), 24)
    assert not plain.importance
    assert plain.run(text(5)).importance is None


def test_refuses_a_model_without_attention(classifier) -> None:
    with pytest.raises(ModelError, match="does not tell how its tokens attend"):
        EagerClassifier(classifier("fnet"), device="cpu", dtype="float32", importance=True)


def test_runtimes_with_importance_are_packages_of_their_own(classifier) -> None:
    plain, fused = RuntimeSpec(classifier("bert"), 24), RuntimeSpec(classifier("bert"), 24, importance=True)
    assert plain.name() != fused.name()


@requires_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_gpu_runtimes_give_importance(classifier, dynamic) -> None:
    assert_right(
        load(classifier("bert"), 24, device="cuda", dynamic=dynamic, importance=True), classifier("bert"), 1e-3
    )
