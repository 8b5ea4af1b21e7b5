"""Our encoders compute what transformers computes: every family, activation and length, padded or not."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_classifiers
from support.tiny_classifiers import PAD, VOCABULARY
from torch import Tensor

from pliant.kernels.encoder import weights as encoder_weights
from pliant.kernels.encoder.importance import received
from pliant.kernels.encoder.model import EncoderClassifier
from pliant.models.encoder_shape import EncoderShape

CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("bert", {"pad_token_id": 0, "hidden_act": "relu", "layer_norm_eps": 1e-2, "num_labels": 1}),
    ("bert", {"hidden_act": "gelu_new", "type_vocab_size": 1, "num_hidden_layers": 1}),
    ("bert", {"hidden_act": "silu", "type_vocab_size": 3, "problem_type": "multi_label_classification"}),
    ("bert", {"hidden_act": "quick_gelu"}),
    ("bert", {"hidden_act": "mish"}),
    ("roberta", {}),
    ("roberta", {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5, "pad_token_id": 3}),
    ("xlm-roberta", {"hidden_act": "gelu_fast"}),
    ("camembert", {"hidden_act": "tanh", "num_attention_heads": 4}),
    ("electra", {}),
    ("electra", {"embedding_size": 32, "hidden_act": "gelu_python"}),
    ("distilbert", {}),
    ("distilbert", {"sinusoidal_pos_embds": True, "activation": "relu", "n_heads": 1}),
]
LENGTHS = (1, 2, 7, 33, 120)

Load = Callable[..., tuple[EncoderClassifier, Any]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, (case[0], *case[1].values()))))
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Our classifier and transformers' from the same folder."""
    kind, options = request.param
    folder = tiny_classifiers.save(tmp_path_factory.mktemp(kind), kind, **options)

    @functools.cache
    def both(importance: bool = False, dtype: torch.dtype = torch.float32) -> tuple[EncoderClassifier, Any]:
        return ours(folder, importance, dtype), tiny_classifiers.read(folder).to(dtype)

    return both


def ours(folder: Path, importance: bool = False, dtype: torch.dtype = torch.float32) -> EncoderClassifier:
    shape = EncoderShape.from_config(json.loads((folder / "config.json").read_text()))
    assert shape is not None
    return encoder_weights.load(folder, shape, device="cpu", dtype=dtype, importance=importance)


def text(*size: int, pad: int = PAD) -> Tensor:
    """Token ids without padding."""
    ids = torch.randint(4, VOCABULARY, size, generator=torch.Generator().manual_seed(sum(size)))
    assert (ids != pad).all()
    return ids


@torch.inference_mode()
def expected(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and importance by transformers."""
    output = model(input_ids=ids, attention_mask=mask, output_attentions=True)
    return output.logits.float(), received(output.attentions, mask)


def assert_same(found: Tensor, wanted: tuple[Tensor, Tensor], importance: bool, rtol: float = 1e-5) -> None:
    logits = wanted[0]
    assert found.dtype == torch.float32
    close = {"rtol": rtol, "atol": rtol * float(logits.abs().max())}
    torch.testing.assert_close(found[:, : logits.shape[1]], logits, **close)
    if importance:
        torch.testing.assert_close(found[:, logits.shape[1] :], wanted[1], rtol=rtol, atol=rtol)
    else:
        assert found.shape == logits.shape


@pytest.mark.parametrize("importance", [False, True])
def test_unpadded_texts_of_any_length(load: Load, importance: bool) -> None:
    model, theirs = load(importance)
    for length in LENGTHS:
        ids = text(1, length)
        assert_same(model(ids), expected(theirs, ids, torch.ones_like(ids)), importance)


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (5,), (3, 3), (1, 24, 8, 2)], ids=str)
def test_padded_texts_that_do_not_touch_each_other(load: Load, importance: bool, lengths: tuple[int, ...]) -> None:
    model, theirs = load(importance)
    longest = max(lengths) + 3
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    ids = torch.where(mask == 1, text(len(lengths), longest), model.pad)
    found = model(ids, mask)
    assert_same(found, expected(theirs, ids, mask), importance)
    for row, length in enumerate(lengths):
        alone = expected(theirs, ids[row : row + 1, :length], mask[row : row + 1, :length])
        labels = alone[0].shape[1]
        assert_same(found[row : row + 1, : labels + length * importance], alone, importance)
        assert not found[row, labels + length :].any()


def test_a_pad_token_within_a_text_counts_as_transformers_counts_it(load: Load) -> None:
    model, theirs = load()
    ids = text(1, 9)
    ids[0, [2, 8]] = model.pad
    assert_same(model(ids), expected(theirs, ids, torch.ones_like(ids)), importance=False)


def test_in_half_precision_it_is_as_near_to_full_precision_as_transformers(load: Load) -> None:
    _, exact = load(importance=True)
    model, theirs = load(importance=True, dtype=torch.bfloat16)
    ids = text(4, 24)
    mask = torch.ones_like(ids)
    wanted, rounded, found = (
        torch.cat(expected(exact, ids, mask), 1),
        torch.cat(expected(theirs, ids, mask), 1),
        model(ids),
    )
    assert (found - wanted).norm() < 1.5 * (rounded - wanted).norm()


def test_the_encoder_alone_gives_the_states_of_all_tokens(load: Load) -> None:
    from pliant.kernels.encoder.attention import Fused

    model, theirs = load()
    ids = text(2, 9)
    states = model.encoder(ids, Fused(None))
    wanted = theirs.base_model(input_ids=ids)[0]
    torch.testing.assert_close(states, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(model.encoder(ids, Fused(None), kept=4), states[:, :4])
