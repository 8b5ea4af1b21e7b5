"""A config.json has the shape that transformers gives it, and none if it asks for what our encoder cannot compute."""

from typing import Any

import pytest

from pliant.models.encoder_shape import EncoderShape
from pliant.torchvision_ops import declare

KINDS = ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_config_leaves_out_is_as_in_transformers(kind: str) -> None:
    declare()
    from transformers import AutoConfig

    full = AutoConfig.for_model(kind).to_dict()
    shape = EncoderShape.from_config({"model_type": kind})
    assert shape == EncoderShape.from_config(full)
    assert shape is not None
    assert (shape.vocab, shape.positions, shape.pad) == (
        full["vocab_size"],
        full["max_position_embeddings"],
        full["pad_token_id"],
    )


def test_distilbert_has_names_of_its_own_and_takes_the_usual_ones() -> None:
    own = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64, "activation": "relu"}
    usual = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    shape = EncoderShape.from_config({"model_type": "distilbert", **own})
    assert shape == EncoderShape.from_config({"model_type": "distilbert", **usual, "hidden_act": "relu"})
    assert shape is not None
    assert (shape.layers, shape.hidden, shape.heads, shape.intermediate) == (3, 32, 2, 64)
    assert (shape.activation, shape.token_types) == ("relu", 0)


@pytest.mark.parametrize(
    ("config", "labels"),
    [({}, 2), ({"num_labels": 5}, 5), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3), ({"id2label": {0: "a"}}, 1)],
)
def test_labels_are_counted(config: dict[str, Any], labels: int) -> None:
    shape = EncoderShape.from_config({"model_type": "bert", **config})
    assert shape is not None
    assert shape.labels == labels


@pytest.mark.parametrize(("kind", "pad"), [("bert", 0), ("roberta", 1)])
def test_a_pad_token_of_null_is_the_usual_one(kind: str, pad: int) -> None:
    shape = EncoderShape.from_config({"model_type": kind, "pad_token_id": None})
    assert shape is not None
    assert shape.pad == pad


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "albert"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"pruned_heads": {"0": [1]}},
        {"quantization_config": {"quant_method": "awq"}},
        {"hidden_act": "xielu"},
        {"hidden_act": None},
        {"hidden_size": 30, "num_attention_heads": 4},
        {"num_hidden_layers": 0},
        {"vocab_size": "many"},
    ],
    ids=str,
)
def test_what_it_does_not_know_has_no_shape(config: dict[str, Any]) -> None:
    assert EncoderShape.from_config({"model_type": "bert", **config} if config else config) is None


def test_what_is_said_as_usual_has_one() -> None:
    usual = {"position_embedding_type": "absolute", "is_decoder": False, "pruned_heads": {}, "hidden_act": "gelu"}
    assert EncoderShape.from_config({"model_type": "bert", **usual}) == EncoderShape.from_config({"model_type": "bert"})
