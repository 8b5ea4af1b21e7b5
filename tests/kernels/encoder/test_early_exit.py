"""Texts that leave early are answered as the plain model's states say behind that layer; others as ever."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import tiny_classifiers
from support.caches import with_libraries
from support.tiny_classifiers import LABELS, LAYERS, VOCABULARY

from pliant.errors import CannotCompileError, ModelError
from pliant.kernels import c_compiler
from pliant.kernels.encoder import exits as encoder_exits
from pliant.kernels.encoder import packed_runtime, timed_runtime
from pliant.kernels.encoder.exits import EarlyExit, Exits
from pliant.kernels.encoder.layer_by_layer import LayerByLayer
from pliant.kernels.encoder.packed_runtime import PackedRuntime
from pliant.kernels.encoder.texts import Stop, Text
from pliant.models.encoder_exits import ExitsInfo, write
from pliant.policies.encoder.confidence import softmax

HIDDEN = 32
LENGTHS = (3, 60, 1, 1, 17, 8, 30)

Load = Callable[..., PackedRuntime]
on_cuda = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.fixture(params=["c", "torch", on_cuda])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Load:
    """The packed runtime of a folder, computed by our C code, by torch where no compiler is, or on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    elif request.param == "c" and c_compiler.compiler() is None:
        pytest.skip("needs a C compiler")

    def loaded(folder: Path, **options: Any) -> PackedRuntime:
        device = "cuda" if request.param == "cuda" else "cpu"
        runtime = packed_runtime.load(folder, 60, device=device, threads=2, **options)
        assert runtime.backend == ("c" if request.param == "c" and not options else "torch")
        return runtime

    return loaded


@pytest.fixture
def texts() -> list[Text]:
    rng = np.random.default_rng(7)
    return [Text(rng.integers(2, VOCABULARY, length), rng.integers(0, 2, length)) for length in LENGTHS]


def heads(cut_off: float, after: tuple[int, int] = (1, 2)) -> Exits:
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(2, LABELS, HIDDEN)) / [[[8]], [[2]]]
    return Exits(after, weights.astype(np.float32), rng.normal(size=(2, LABELS)).astype(np.float32) / 8, cut_off)


def save(folder: Path, exits: Exits) -> None:
    (folder / "exits").mkdir()
    save_file({"weights": exits.weights, "biases": exits.biases}, folder / "exits" / "model.safetensors")
    write(folder, ExitsInfo(after=exits.after, cut_off=exits.cut_off))


@torch.inference_mode()
def expected(model: Any, text: Text, exits: Exits) -> tuple[Any, int]:
    """Of one text alone, by transformers' hidden states."""
    ids, types = (torch.tensor(np.asarray(each))[None] for each in (text.ids, text.types))
    kinds = {"token_type_ids": types} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    output = model(input_ids=ids, output_hidden_states=True, **kinds)
    for after, weight, bias in zip(exits.after, exits.weights, exits.biases, strict=True):
        logits = weight @ output.hidden_states[after][0].mean(0).numpy() + bias
        if torch.tensor(logits).softmax(0).max() > exits.cut_off:
            return logits, after
    return output.logits[0], LAYERS


@pytest.mark.parametrize("after", [(0, 2), (1, 2)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert", {}),
        ("deberta-v2", {}),
        ("distilbert", {}),
        ("electra", {}),
        ("modernbert", {}),
        ("modernbert", {"classifier_pooling": "mean"}),
        ("mpnet", {}),
        ("roberta", {}),
    ],
)
def test_answers_as_the_plain_model_at_each_exit(
    load: Load, kind: str, options: dict[str, str], after: tuple[int, int], texts: list[Text], tmp_path: Path
) -> None:
    folder = tiny_classifiers.save(tmp_path, kind, **options)
    theirs = tiny_classifiers.read(folder)
    runtime = load(folder)
    left = set()
    for cut_off in (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        exits = heads(cut_off, after)
        runtime.leave_early(exits)
        given = texts if kind == "bert" else [Text(text.ids, np.zeros(len(text.ids), np.int64)) for text in texts]
        for text, output in zip(given, runtime.run_all(given), strict=True):
            logits, layers = expected(theirs, text, exits)
            assert output.layers == layers
            np.testing.assert_allclose(output.logits, logits, atol=1e-4)
            left.add(layers)
    assert left == {*after, LAYERS}


class Counted:
    """A stand-in for the encoder and its pass: what is read of a text is its number, and the texts of each range of
    layers are counted."""

    layers, hidden = 6, 1

    def __init__(self) -> None:
        self.ranges: list[tuple[list[float], range]] = []

    def begin(self, ids: np.ndarray, types: np.ndarray | None, lengths: Any) -> "Counted":
        self.texts, self.done = ids[np.cumsum([0, *lengths[:-1]])].astype(np.float32), 0
        return self

    def exits(self, exits: Exits) -> LayerByLayer[np.ndarray]:
        return LayerByLayer(self, exits)

    def exit(self, weight: np.ndarray, bias: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        return lambda means: means @ weight.T + bias

    def advance(self, end: int) -> None:
        self.ranges.append((self.texts.tolist(), range(self.done, end)))
        self.done = end

    def means(self) -> np.ndarray:
        return self.texts[:, None]

    def keep(self, staying: np.ndarray) -> None:
        assert staying.any(), "there is nothing to go on with"
        self.texts = self.texts[staying]

    def answers(self) -> np.ndarray:
        return np.zeros((len(self.texts), 2), np.float32)


def test_only_those_that_stay_are_computed_further() -> None:
    encoder = Counted()
    exits = Exits((2, 4), np.array([[[1], [0]]] * 2, np.float32), np.zeros((2, 2), np.float32), 0.99)
    ids = np.array([1, 1, 90, 90, 90, -99, -99, 40])
    found = EarlyExit(encoder, exits).run(ids, None, [2, 3, 2, 1], [exits.stops] * 4)
    assert [output.layers for output in found] == [6, 2, 2, 2]
    assert encoder.ranges == [([1, 90, -99, 40], range(2)), ([1], range(2, 4)), ([1], range(4, 6))]
    assert [len(output.earlier) for output in found] == [2, 0, 0, 0]


def test_no_layer_is_computed_behind_the_exit_at_which_the_last_text_left() -> None:
    encoder = Counted()
    exits = Exits((2, 4), np.array([[[1], [0]]] * 2, np.float32), np.zeros((2, 2), np.float32), 0.99)
    EarlyExit(encoder, exits).run(np.array([90, -99]), None, [1, 1], [exits.stops] * 2)
    assert [layers for _, layers in encoder.ranges] == [range(2)]


@pytest.mark.parametrize("unasked", [False, True])
def test_each_text_leaves_where_it_says_and_hears_of_the_exits_before(
    load: Load, unasked: bool, texts: list[Text], tmp_path: Path
) -> None:
    folder = tiny_classifiers.save(tmp_path, "bert")
    exits, runtime = heads(0.0), load(folder)
    everywhere = [text._replace(stops=(Stop(1, 1.0, np.inf), Stop(2, 1.0, np.inf))) for text in texts]
    runtime.leave_early(exits, unasked=unasked)
    whole = runtime.run_all(everywhere)
    plain = load(folder).run_all(texts)
    sure = np.array([[softmax(row.astype(np.float64) / 2).max() for row in output.earlier] for output in whole])
    given, expected = [], []
    for place, (text, at) in enumerate(zip(texts, sure, strict=True)):
        middle = float(at[0]) + (1e-6 if place % 2 else -1e-6)
        stops = ((), (Stop(1, 2.0, middle), Stop(2, 1.0, 0.0)), (Stop(2, 2.0, middle),))[place % 3]
        given.append(text._replace(stops=stops))
        if not stops:
            expected.append([1] if unasked else [LAYERS])
        elif len(stops) == 2:
            expected.append([1, 2] if place % 2 else [1])
        else:
            expected.append([2] if at[1] >= middle else [2, LAYERS])
    for text, output, read, one, everything in zip(given, runtime.run_all(given), expected, plain, whole, strict=True):
        assert output.layers == read[-1]
        known = {1: everything.earlier[0], 2: everything.earlier[1], LAYERS: one.logits}
        for row, layers in zip([*output.earlier, output.logits], read, strict=True):
            np.testing.assert_allclose(row, known[layers], atol=1e-5)
        assert list(output.earlier_s) == sorted(output.earlier_s)
        assert len(output.earlier_s) == len(output.earlier)
        assert text.stops or not output.earlier


def test_a_stop_where_there_is_no_exit(load: Load, texts: list[Text], tmp_path: Path) -> None:
    runtime = load(tiny_classifiers.save(tmp_path, "bert"))
    asked = [texts[0]._replace(stops=(Stop(3, 1.0, 0.5),))]
    with pytest.raises(ValueError, match="there are no exits"):
        runtime.run_all(asked)
    runtime.leave_early(heads(0.5))
    with pytest.raises(ValueError, match=r"no exits behind \[3\] layers; there are behind \[1, 2\]"):
        runtime.run_all(asked)


def test_with_importance_no_text_leaves_early(load: Load, texts: list[Text], tmp_path: Path) -> None:
    folder = tiny_classifiers.save(tmp_path, "bert")
    plain, runtime = load(folder), load(folder)
    runtime.leave_early(heads(0.0))
    for one, other in zip(plain.run_all(texts, importance=True), runtime.run_all(texts, importance=True), strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)
        np.testing.assert_array_equal(one.importance, other.importance)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "deberta-v2", "mpnet"])
def test_states_in_bfloat16_are_read_in_float32(load: Load, kind: str, texts: list[Text], tmp_path: Path) -> None:
    folder = tiny_classifiers.save(tmp_path, kind)
    given = [Text(text.ids, None, (Stop(1, 1.0, np.inf), Stop(2, 1.0, np.inf))) for text in texts]
    exact, halved = load(folder), load(folder, dtype="bfloat16")
    for runtime in (exact, halved):
        runtime.leave_early(heads(0.5))
    for one, other in zip(exact.run_all(given), halved.run_all(given), strict=True):
        for wanted, found in zip([*one.earlier, one.logits], [*other.earlier, other.logits], strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, atol=0.05 * max(1.0, np.abs(wanted).max()))


@pytest.mark.skipif(c_compiler.compiler() is None, reason="needs a C compiler")
def test_exits_are_read_from_the_models_folder(texts: list[Text], tmp_path: Path) -> None:
    folder = tiny_classifiers.save(tmp_path, "bert")
    with pytest.raises(ModelError, match="has no exits; train some with pliant train-exits"):
        timed_runtime.load(folder, 60, measuring=False, exits=True)
    save(folder, heads(0.0))
    found = timed_runtime.load(folder, 60, measuring=False, exits=True).run_all(texts)
    assert {output.layers for output in found} == {1}
    assert {output.layers for output in timed_runtime.load(folder, 60, measuring=False).run_all(texts)} == {None}


def test_without_a_compiler_exits_are_worth_a_runtime_and_its_times(
    texts: list[Text], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(with_libraries(tmp_path / "cache")))
    monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    folder = tiny_classifiers.save(tmp_path / "model", "bert")
    save(folder, heads(0.0))
    with pytest.raises(CannotCompileError, match="no C compiler was found"):
        timed_runtime.load(folder, 60)
    assert not timed_runtime.is_prepared(folder, 60, exits=True)
    timed_runtime.prepare(folder, 60, exits=True)
    assert timed_runtime.is_prepared(folder, 60, exits=True)
    assert not timed_runtime.is_prepared(folder, 60), "with a compiler other times will hold"
    runtime = timed_runtime.load(folder, 60, measuring=False, exits=True)
    assert runtime.backend == "torch"
    assert runtime.times
    assert {output.layers for output in runtime.run_all(texts)} == {1}


def test_exits_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tiny_classifiers.save(tmp_path, "bert")
    save(folder, heads(0.0))
    (folder / "exits" / "config.json").write_text('{"after": [-1], "cut_off": 0.5}')
    with pytest.raises(ModelError, match=r"after: must be .* got \[-1\]; train some"):
        encoder_exits.load(folder)


def test_models_of_transformers_have_no_exits(tmp_path: Path) -> None:
    runtime = packed_runtime.load(tiny_classifiers.save(tmp_path, "albert"), 60)
    with pytest.raises(ValueError, match="texts leave only what pliant computes itself, not what transformers does"):
        runtime.leave_early(heads(0.0))
