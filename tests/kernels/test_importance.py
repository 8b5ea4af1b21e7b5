"""Importance is what transformers' own attention weights add up to, however a model computes and texts are padded."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pliant.errors import ModelError
from pliant.kernels import compiled_classifier, telling_classifier
from pliant.kernels.compiled_classifier import Runtime, load
from pliant.kernels.eager_classifier import EagerClassifier
from pliant.kernels.importance import received
from pliant.kernels.runtime_cache import RuntimeSpec
from pliant.kernels.telling_classifier import FUSED, TellingRuntime
from pliant.torchvision_mend import mend

VOCABULARY, LABELS, LAYERS, HEADS = 99, 3, 3, 2
ARCHITECTURES = ["albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta"]
TOLERANCE = 1e-4
LENGTHS = (1, 2, 7, 24)

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny untrained classifiers by model type."""
    mend()
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_labels": LABELS,
        "initializer_range": 0.5,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "pad_token_id": 1,
    }
    special = {
        "albert": {"embedding_size": 16},
        "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        "electra": {"embedding_size": 16},
        "distilbert": {"dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64},
        "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "initializer_cutoff_factor": 1.0},
        "fnet": {},
    }
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name in [*ARCHITECTURES, "fnet"]:
        config = hf.AutoConfig.for_model(name, **common, **special.get(name, {}))
        hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(root / name)
    return {name: root / name for name in [*ARCHITECTURES, "fnet"]}


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path_factory.getbasetemp() / "importance"))
    compiled_classifier._warn_once.cache_clear()


def text(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(2, VOCABULARY, length)


def expected(folder: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and importance of an unpadded text by transformers alone."""
    import transformers as hf

    model = hf.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
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
def test_eager_importance_is_the_sum_of_attention_weights(folders, architecture) -> None:
    folder = folders[architecture]
    model = EagerClassifier(folder, device="cpu", dtype="float32", importance=True)
    for length in LENGTHS:
        logits, importance = expected(folder, text(length))
        assert importance.sum() == pytest.approx(LAYERS * HEADS * length, rel=1e-4)
        for padding in (0, 1, 9):
            ids = np.concatenate([text(length), np.full(padding, model.facts["pad"])])
            mask = np.arange(length + padding) < length
            found = model(torch.from_numpy(np.stack([ids, mask]))).numpy()
            np.testing.assert_allclose(found[:LABELS], logits, atol=TOLERANCE)
            np.testing.assert_allclose(found[LABELS : LABELS + length], importance, atol=TOLERANCE * length)
            assert not found[LABELS + length :].any()


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
@pytest.mark.parametrize("lengths", [(5,), (3, 3), (1, 24, 8, 2)], ids=str)
def test_texts_of_a_batch_do_not_touch_each_other(folders, architecture, lengths) -> None:
    model = EagerClassifier(folders[architecture], device="cpu", dtype="float32", importance=True).model
    mask = torch.tensor(np.arange(max(lengths)) < np.array(lengths)[:, None]).long()
    ids = torch.full_like(mask, 1)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.from_numpy(text(length))
    found = received(model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions, mask)
    for row, length in zip(found.numpy(), lengths, strict=True):
        _, importance = expected(folders[architecture], text(length))
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
def test_long_texts_are_read_twice_if_their_importance_is_wanted_and_no_others(folders, length, wanted) -> None:
    plain, telling = (Counted(folders["roberta"], 100, importance) for importance in (False, True))
    runtime = TellingRuntime(plain.runtime, telling.runtime)
    logits, importance = expected(folders["roberta"], text(length))
    asked: list[np.ndarray] = []
    told = runtime.tell(text(length), lambda said: bool(asked.append(said)) or wanted)
    np.testing.assert_allclose(told.logits, logits, atol=TOLERANCE)
    np.testing.assert_array_equal(asked, [told.logits])
    if wanted:
        assert told.importance is not None
        np.testing.assert_allclose(told.importance, importance, atol=TOLERANCE * LAYERS * HEADS * length)
    else:
        assert told.importance is None
    short = length <= FUSED
    assert (plain.passes, telling.passes) == ((0, 1) if short else (1, int(wanted)))
    assert (told.telling_s > 0) == (wanted and not short)
    np.testing.assert_array_equal(runtime(text(length)), told.logits)


def test_a_runtime_for_short_texts_holds_one_package(folders, monkeypatch) -> None:
    made: list[tuple[int, bool]] = []

    def load(folder: Path, max_length: int, importance: bool = False) -> Runtime:
        made.append((max_length, importance))
        return Counted(folder, max_length, importance).runtime

    monkeypatch.setattr(telling_classifier.compiled_classifier, "load", load)
    monkeypatch.setattr(telling_classifier.compiled_classifier, "prepare", load)
    for do in (telling_classifier.prepare, telling_classifier.load):
        made.clear()
        do(folders["bert"], FUSED)
        do(folders["bert"], FUSED + 1)
        assert made == [(FUSED, True), (FUSED + 1, False), (FUSED + 1, True)]
    runtime = telling_classifier.load(folders["bert"], FUSED)
    assert (runtime.max_length, runtime.backend, runtime.dynamic) == (FUSED, "eager", True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiled_runtime_gives_importance_in_the_same_pass(folders) -> None:
    runtime = load(folders["distilbert"], 24, dynamic=True, importance=True)
    assert (runtime.backend, runtime.dynamic, runtime.importance) == ("aoti", True, True)
    assert_right(runtime, folders["distilbert"])


def test_a_static_runtime_gives_that_of_the_text_without_its_padding(folders) -> None:
    model = EagerClassifier(folders["roberta"], device="cpu", dtype="float32", importance=True)
    runtime = Runtime(model, "aoti", 24, importance=True, **model.facts)
    assert_right(runtime, folders["roberta"])
    first = runtime.run(text(5)).importance
    assert first is not None
    kept = first.copy()
    runtime.run(text(24))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("architecture", ["roberta", "deberta-v2"])
def test_without_compiler_the_eager_model_gives_it(folders, architecture, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    runtime = load(folders[architecture], 24, importance=True)
    assert runtime.backend == "eager"
    assert_right(runtime, folders[architecture])
    plain = load(folders[architecture], 24)
    assert not plain.importance
    assert plain.run(text(5)).importance is None


def test_refuses_a_model_without_attention(folders) -> None:
    with pytest.raises(ModelError, match="does not tell how its tokens attend"):
        EagerClassifier(folders["fnet"], device="cpu", dtype="float32", importance=True)


def test_runtimes_with_importance_are_packages_of_their_own(folders) -> None:
    plain, fused = RuntimeSpec(folders["bert"], 24), RuntimeSpec(folders["bert"], 24, importance=True)
    assert plain.name() != fused.name()


@requires_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_gpu_runtimes_give_importance(folders, dynamic) -> None:
    assert_right(load(folders["bert"], 24, device="cuda", dynamic=dynamic, importance=True), folders["bert"], 1e-3)
