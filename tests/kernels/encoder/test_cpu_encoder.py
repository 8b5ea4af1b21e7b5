"""The encoder in C computes what the one in torch computes: every family, activation, task and mix of lengths."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_classifiers
from support.tiny_classifiers import VOCABULARY
from torch import Tensor

from pliant.kernels import c_compiler
from pliant.kernels.encoder import weights
from pliant.kernels.encoder.compiled_classifier import TOLERANCE
from pliant.kernels.encoder.cpu_encoder import CpuEncoder
from pliant.kernels.encoder.eager_classifier import load_model
from pliant.kernels.encoder.exits import Batch, Exits
from pliant.kernels.encoder.model import EncoderModel
from pliant.kernels.encoder.packed_in_torch import TorchEncoder
from pliant.kernels.encoder.weights import EncoderWeights
from pliant.models.decoder_info import read_json
from pliant.models.encoder_shape import EncoderShape

pytestmark = pytest.mark.skipif(c_compiler.compiler() is None, reason="needs a C compiler")

CASES: list[tuple[str, dict[str, Any]]] = [
    *(("bert", {"hidden_act": act}) for act in ("gelu", "gelu_new", "quick_gelu", "relu", "silu", "tanh", "mish")),
    ("bert", {"type_vocab_size": 3, "hidden_size": 96, "num_attention_heads": 2, "intermediate_size": 40}),
    ("roberta", {}),
    ("distilbert", {"n_heads": 1}),
    ("electra", {}),
    ("mpnet", {}),
    ("deberta-v2", {}),
    ("deberta-v2", {"pos_att_type": "c2p", "position_biased_input": True}),
    ("deberta-v2", {"pos_att_type": "p2c", "share_att_key": False, "position_buckets": -1}),
    ("modernbert", {}),
    ("modernbert", {"classifier_pooling": "mean", "local_attention": 40}),
]
LENGTHS = [(1,), (16,), (128,), (120, 17, 1, 64, 33, 2), (5,) * 20]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, (case[0], *case[1].values()))))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, options = request.param

    @functools.cache
    def folder(task: str) -> Path:
        return tiny_classifiers.save(tmp_path_factory.mktemp(kind), kind, task, **options)

    return folder


@functools.cache
def reference(folder: Path) -> EncoderModel:
    model = load_model(folder, "cpu", torch.float32)
    assert isinstance(model, EncoderModel)
    return model


def weights_in(folder: Path) -> EncoderWeights:
    config = read_json(folder / "config.json")
    shape = EncoderShape.from_config(config)
    assert shape
    return weights.read(folder, config, shape)


def assert_right(folder: Path, lengths: tuple[int, ...], encoder: CpuEncoder, importance: bool = False) -> None:
    model = reference(folder)
    most = model.shape.max_length
    lengths = tuple(min(length, most) for length in lengths)
    rng = np.random.default_rng(sum(lengths))
    ids = rng.integers(0, VOCABULARY, sum(lengths))
    types = rng.integers(0, model.token_types, sum(lengths)) if model.token_types > 1 else None
    found, received = encoder(ids, types, lengths, importance=importance)
    ends = np.cumsum(lengths)
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        one = slice(end - length, end)
        given = None if types is None else torch.from_numpy(types[one])[None]
        wanted = model.padded(torch.from_numpy(ids[one])[None], types=given, importance=importance)[0]
        answer = found[one] if not model.head.shape.pooling else found[row]
        outputs = len(wanted) - length * importance
        assert_close(answer, wanted[:outputs])
        if received is not None:
            assert_close(received[one], wanted[outputs:])


def assert_leave_alike(folder: Path, encoder: CpuEncoder) -> None:
    """Some texts read some exits, and some of these leave."""
    model = reference(folder)
    rng = np.random.default_rng(0)
    exits = Exits((0, 1, 2), rng.normal(size=(3, 5, encoder.hidden)).astype(np.float32), np.ones((3, 5), np.float32), 1)
    ways = encoder.exits(exits), TorchEncoder(model, "cpu").exits(exits)
    for lengths in [tuple(min(length, model.shape.max_length) for length in each) for each in LENGTHS] * 3:
        ids = rng.integers(0, VOCABULARY, sum(lengths))
        types = rng.integers(0, model.token_types, sum(lengths)) if model.token_types > 1 else None
        temperatures = rng.choice([0.0, 0.5, 2.0], (3, len(lengths)))
        sure_from = rng.choice([0.0, np.inf, np.inf], (3, len(lengths)))
        found, wanted = (leave(Batch(ids, types, lengths, temperatures, sure_from)) for leave in ways)
        assert found.layers == wanted.layers
        for place, text in np.argwhere((temperatures > 0) & (np.arange(3)[:, None] <= found.layers)):
            assert_close(found.said[place, text], torch.from_numpy(wanted.said[place, text]))
        assert len(found.answers) == found.layers.count(model.shape.layers)
        for one, other in zip(found.answers, wanted.answers, strict=True):
            assert_close(one, torch.from_numpy(other))


def assert_close(found: np.ndarray, wanted: Tensor) -> None:
    atol = TOLERANCE["float32"] * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("task", ["classify", "tokens", "embed"])
def test_answers_as_the_model_in_torch(saved: Any, task: str) -> None:
    encoder = CpuEncoder(weights_in(saved(task)), threads=1)
    for lengths in LENGTHS:
        assert_right(saved(task), lengths, encoder)


def test_gives_importance(saved: Any) -> None:
    encoder = CpuEncoder(weights_in(saved("classify")), threads=1)
    for lengths in LENGTHS:
        assert_right(saved("classify"), lengths, encoder, importance=True)


def test_answers_alike_on_several_threads(saved: Any) -> None:
    encoder = CpuEncoder(weights_in(saved("classify")), threads=3)
    for lengths in LENGTHS:
        assert_right(saved("classify"), lengths, encoder)


@pytest.mark.parametrize("threads", [1, 3])
def test_texts_leave_as_in_torch(saved: Any, threads: int) -> None:
    assert_leave_alike(saved("classify"), CpuEncoder(weights_in(saved("classify")), threads=threads))


@pytest.mark.skipif("x86" not in c_compiler.platform.machine(), reason="needs x86")
@pytest.mark.parametrize("options", [("-march=x86-64",), ("-march=x86-64-v3",)], ids=["sse", "avx2"])
def test_answers_alike_on_older_machines(saved: Any, options: tuple[str, ...]) -> None:
    encoder = CpuEncoder(weights_in(saved("classify")), threads=1, options=options)
    for lengths in LENGTHS:
        assert_right(saved("classify"), lengths, encoder)
    assert_leave_alike(saved("classify"), encoder)


def test_refuses_what_it_cannot_compute(tmp_path: Path) -> None:
    read = weights_in(tiny_classifiers.save(tmp_path, "bert", num_attention_heads=4))
    with pytest.raises(ValueError, match="not supported"):
        CpuEncoder(read, threads=1)
