"""A config.json has the shape that transformers gives it, and none if it asks for what our encoder cannot compute."""

from typing import Any

import pytest

from pliant.models.encoder_shape import Disentangled, EncoderShape, Rotary
from pliant.torchvision_ops import declare

KINDS = ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "modernbert"]
DISENTANGLED = {"relative_attention": True, "pos_att_type": "p2c|c2p"}


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
        {"model_type": "mpnet", "relative_attention_num_buckets": 16},
        {"model_type": "deberta-v2"},
        {"model_type": "deberta-v2", **DISENTANGLED, "conv_kernel_size": 3},
        {"model_type": "deberta-v2", **DISENTANGLED, "pos_att_type": ["p2p"]},
        {"model_type": "deberta-v2", **DISENTANGLED, "position_biased_input": False, "type_vocab_size": 2},
        {"model_type": "modernbert", "norm_bias": True},
        {"model_type": "modernbert", "rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
    ],
    ids=str,
)
def test_what_it_does_not_know_has_no_shape(config: dict[str, Any]) -> None:
    assert EncoderShape.from_config({"model_type": "bert", **config} if config else config) is None


def test_deberta_tells_which_distances_there_are() -> None:
    config = {"model_type": "deberta-v2", **DISENTANGLED, "position_biased_input": False}
    shape = EncoderShape.from_config(config)
    assert shape is not None
    assert not shape.adds_positions
    assert shape.disentangled == Disentangled(512, 512, ("c2p", "p2c"), shared=False, normed=False)
    shape = EncoderShape.from_config(
        config | {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    )
    assert shape is not None
    assert shape.disentangled == Disentangled(512, 256, ("c2p", "p2c"), shared=True, normed=True)


@pytest.mark.parametrize(
    "config",
    [
        {"global_attn_every_n_layers": 2, "global_rope_theta": 7.0, "local_rope_theta": 5.0},
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 7.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
            },
        },
    ],
    ids=["old keys", "new keys"],
)
def test_modernbert_tells_which_layers_see_what_is_near(config: dict[str, Any]) -> None:
    shape = EncoderShape.from_config({"model_type": "modernbert", "num_hidden_layers": 2, **config})
    assert shape is not None
    assert shape.rotary == Rotary(7.0, 5.0, 64, (False, True))


def test_what_is_said_as_usual_has_one() -> None:
    usual = {"position_embedding_type": "absolute", "is_decoder": False, "pruned_heads": {}, "hidden_act": "gelu"}
    assert EncoderShape.from_config({"model_type": "bert", **usual}) == EncoderShape.from_config({"model_type": "bert"})
