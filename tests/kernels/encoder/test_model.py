"""Our encoders compute what transformers computes: every family, task, activation and length, padded, packed or not."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_classifiers
from support.tiny_classifiers import PAD, VOCABULARY
from torch import Tensor

from pliant.kernels.encoder.eager_classifier import load_model
from pliant.kernels.encoder.importance import received
from pliant.kernels.encoder.layout import Packed, Padded
from pliant.kernels.encoder.model import EncoderModel

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
    ("mpnet", {}),
    ("mpnet", {"pad_token_id": 0, "num_attention_heads": 4, "hidden_act": "relu"}),
    ("deberta-v2", {}),
    (
        "deberta-v2",
        {"pos_att_type": "c2p", "position_biased_input": True, "type_vocab_size": 2, "norm_rel_ebd": "none"},
    ),
    (
        "deberta-v2",
        {"pos_att_type": "p2c", "share_att_key": False, "position_buckets": -1, "pooler_hidden_act": "tanh"},
    ),
    ("deberta-v2", {"share_att_key": False, "position_buckets": 32, "max_relative_positions": 64}),
    ("modernbert", {}),
    ("modernbert", {"global_attn_every_n_layers": 1, "classifier_pooling": "mean", "classifier_activation": "relu"}),
]
LENGTHS = (1, 2, 7, 33, 120)
TASKS = ("classify", "tokens", "embed")

Load = Callable[..., tuple[EncoderModel, Any]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, (case[0], *case[1].values()))))
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Our model and transformers' from the same folder."""
    kind, options = request.param

    @functools.cache
    def saved(task: str) -> Path:
        return tiny_classifiers.save(tmp_path_factory.mktemp(kind), kind, task, **options)

    @functools.cache
    def both(task: str = "classify", dtype: torch.dtype = torch.float32) -> tuple[EncoderModel, Any]:
        model = load_model(saved(task), "cpu", dtype)
        assert isinstance(model, EncoderModel)
        return model, tiny_classifiers.read(saved(task), task).to(dtype)

    return both


def text(*size: int, pad: int = PAD) -> Tensor:
    """Token ids without padding."""
    ids = torch.randint(4, VOCABULARY, size, generator=torch.Generator().manual_seed(sum(size)))
    assert (ids != pad).all()
    return ids


def types_of(model: EncoderModel, ids: Tensor) -> Tensor | None:
    """Random token types, as far as the model has any."""
    if model.token_types < 2:
        return None
    return torch.randint(0, model.token_types, ids.shape, generator=torch.Generator().manual_seed(ids.numel()))


@torch.inference_mode()
def expected(model: Any, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits and importance by transformers; of an embedding, the mean of the last layer's states."""
    given = {} if types is None else {"token_type_ids": types}
    output = model(input_ids=ids, attention_mask=mask, output_attentions=True, **given)
    if hasattr(output, "logits"):
        return output.logits.float(), received(output.attentions, mask)
    states = output.last_hidden_state.float()
    return (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True), received(output.attentions, mask)


def assert_same(found: Tensor, wanted: tuple[Tensor, Tensor], importance: bool = False, rtol: float = 1e-5) -> None:
    logits = wanted[0]
    assert found.dtype == torch.float32
    close = {"rtol": rtol, "atol": rtol * max(1.0, float(logits.abs().max()))}
    torch.testing.assert_close(found[:, : logits.shape[1]], logits, **close)
    if importance:
        torch.testing.assert_close(found[:, logits.shape[1] :], wanted[1], rtol=rtol, atol=rtol)
    else:
        assert found.shape == logits.shape


@pytest.mark.parametrize("task", TASKS)
def test_unpadded_texts_of_any_length(load: Load, task: str) -> None:
    model, theirs = load(task)
    for length in LENGTHS:
        ids = text(1, length)
        assert_same(model.padded(ids), expected(theirs, ids, torch.ones_like(ids)))
        types = types_of(model, ids)
        assert_same(model.padded(ids, types=types), expected(theirs, ids, torch.ones_like(ids), types))


def test_importance_of_unpadded_texts(load: Load) -> None:
    model, theirs = load()
    for length in LENGTHS:
        ids = text(1, length)
        found = model.padded(ids, importance=True)
        assert_same(found, expected(theirs, ids, torch.ones_like(ids)), importance=True)


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (5,), (3, 3), (1, 24, 8, 2)], ids=str)
def test_padded_texts_that_do_not_touch_each_other(load: Load, importance: bool, lengths: tuple[int, ...]) -> None:
    model, theirs = load()
    ids, mask = padded(model, lengths, 3)
    types = types_of(model, ids)
    found = model.padded(ids, mask, types, importance=importance)
    assert_same(found, expected(theirs, ids, mask, types), importance)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1), slice(0, length)
        alone = expected(theirs, ids[one], mask[one], None if types is None else types[one])
        labels = alone[0].shape[1]
        assert_same(found[row : row + 1, : labels + length * importance], alone, importance)
        assert not found[row, labels + length :].any()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("lengths", [(1,), (120,), (3, 3), (1, 24, 8, 2, 120)], ids=str)
def test_batched_and_packed_texts_are_answered_as_alone(load: Load, task: str, lengths: tuple[int, ...]) -> None:
    model, theirs = load(task)
    ids, mask = padded(model, lengths, 0)
    types = types_of(model, ids)
    together = model.padded(ids, mask, types)
    chosen = mask == 1
    packed = model(ids[chosen], None if types is None else types[chosen], Packed(lengths, "cpu"))
    if task == "tokens":
        parts: Sequence[Tensor] = packed.split(lengths)
    else:
        parts = packed[:, None]
    for row, length in enumerate(lengths):
        one = slice(row, row + 1), slice(0, length)
        alone, _ = expected(theirs, ids[one], mask[one], None if types is None else types[one])
        assert_same(parts[row], (alone[0] if task == "tokens" else alone, mask))
        assert_same(together[row, :length] if task == "tokens" else together[row : row + 1], (parts[row], mask))


def padded(model: EncoderModel, lengths: Sequence[int], more: int) -> tuple[Tensor, Tensor]:
    longest = max(lengths) + more
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return torch.where(mask == 1, text(len(lengths), longest), model.pad), mask


def test_a_pad_token_within_a_text_counts_as_transformers_counts_it(load: Load) -> None:
    model, theirs = load()
    ids = text(1, 9)
    ids[0, [2, 8]] = model.pad
    assert_same(model.padded(ids), expected(theirs, ids, torch.ones_like(ids)))
    assert_same(model(ids[0], None, Packed([9], "cpu")), expected(theirs, ids, torch.ones_like(ids)))


def test_in_half_precision_it_is_as_near_to_full_precision_as_transformers(load: Load) -> None:
    _, exact = load()
    model, theirs = load(dtype=torch.bfloat16)
    ids = text(4, 24)
    mask = torch.ones_like(ids)
    wanted, rounded, found = (
        torch.cat(expected(exact, ids, mask), 1),
        torch.cat(expected(theirs, ids, mask), 1),
        model.padded(ids, importance=True),
    )
    assert (found - wanted).norm() < 1.5 * (rounded - wanted).norm()


def test_the_encoder_alone_gives_the_states_of_all_tokens(load: Load) -> None:
    model, theirs = load()
    ids = text(2, 9)
    wanted = theirs.base_model(input_ids=ids)[0].detach()
    layout = Padded(ids, None)
    states = model.encoder(ids.flatten(), None, layout)
    torch.testing.assert_close(states.unflatten(0, (2, 9)), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(model.encoder(ids.flatten(), None, layout, firsts=True), states[[0, 9]])
