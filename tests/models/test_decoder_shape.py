"""What is read from a config.json is what transformers makes of it, and what cannot be served is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.decoders import FAMILIES, make

from pliant.models.decoder_shape import DecoderShape, Rope

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
"""As the model of 8 billion parameters was published, before `rope_parameters`."""
QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def shape(config: dict[str, Any], **changes: Any) -> DecoderShape:
    return DecoderShape.from_config({**config, **changes})


def test_a_published_llama() -> None:
    found = shape(LLAMA_3_1)
    assert found.rope == Rope(500_000.0, "llama3", 8.0, 8192, low_frequency=1.0, high_frequency=4.0)
    assert (found.head_dim, found.kv_heads, found.max_length) == (128, 8, 131_072)
    assert found.eos == (128001, 128008, 128009)
    assert not any((found.tied, found.qkv_bias, found.output_bias, found.mlp_bias, found.qk_norm))
    assert found.windows == (None,) * 32
    assert found.parameters() == 8_030_261_248
    assert found.kv_bytes(1, 2) == 128 * 1024


def test_a_published_qwen() -> None:
    found = shape(QWEN_2_5)
    assert found.rope == Rope(1_000_000.0)
    assert (found.tied, found.qkv_bias, found.output_bias, found.eos) == (True, True, False, (151645,))
    assert found.windows == (None,) * 24
    assert found.parameters() == 494_032_768


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    model = make(name)
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    assert DecoderShape.from_config(config).parameters() == model.num_parameters()


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = LLAMA_3_1["rope_scaling"]
    new = {key: value for key, value in LLAMA_3_1.items() if key not in ("rope_scaling", "rope_theta")}
    assert shape(new, rope_parameters={**scaling, "rope_theta": 500000.0}) == shape(LLAMA_3_1)
    old = {"type": "linear", "factor": 4.0}
    assert shape(LLAMA_3_1, rope_scaling=old).rope == Rope(500_000.0, "linear", 4.0, 131_072)


def test_dynamic_rope_stretches_nothing_up_to_its_length() -> None:
    assert shape(LLAMA_3_1, rope_scaling={"rope_type": "dynamic", "factor": 2.0}).rope == Rope(500_000.0)


def test_yarn_reads_all_its_numbers() -> None:
    scaling = {
        "rope_type": "yarn",
        "original_max_position_embeddings": 32768,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
    rope = shape(QWEN_2_5, rope_scaling=scaling, max_position_embeddings=131072).rope
    assert rope == Rope(1e6, "yarn", 4.0, 32768, 1.0, 1.0, 16, 2, False, None, 0.7, 0.9)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 512}, (None,) * 21 + (512,) * 3),
        ({"use_sliding_window": True, "sliding_window": 32768}, (None,) * 24),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"] * 12,
            },
            (64, None) * 12,
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, (4096,) * 24),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 24),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 4096}, (None,) * 24),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert shape(QWEN_2_5, **changes).windows == windows


def test_what_old_configs_leave_out_is_what_transformers_takes() -> None:
    old = {key: LLAMA_3_1[key] for key in LLAMA_3_1 if not key.startswith(("rope", "eos", "tie", "num_key", "rms"))}
    found = shape(old)
    assert (found.kv_heads, found.eos, found.rope.theta, found.norm_eps, found.tied) == (32, (2,), 1e4, 1e-6, False)
    assert shape(old, eos_token_id=None).eos == ()
    mistral = shape(old, architectures=["MistralForCausalLM"])
    assert (mistral.kv_heads, mistral.windows) == (8, (4096,) * 32)
    assert shape(old, architectures=["Qwen3ForCausalLM"], hidden_size=1024).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM; choose one of LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "its architecture is nothing"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\); choose the float32"),
        ({"hidden_act": "gelu"}, "its activation is gelu; only silu"),
        ({"partial_rotary_factor": 0.5}, "its partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "of type longrope; choose a model with one of default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear RoPE needs positive numbers for factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor and high_freq_factor"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {}}}, "differ by layer type"),
        ({"num_key_value_heads": 5}, "32 attention heads of 128 dimensions over 5 key/value heads"),
        ({"head_dim": 65}, "dimensions even"),
        ({"vocab_size": None}, "its vocab_size must be a positive whole number, got None; is its config.json"),
        ({"hidden_size": "4096"}, "its hidden_size must be a positive whole number, got '4096'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "chunked_attention"] * 16},
            "for each of 32 layers, got 32: chunked_attention, full_attention",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "32 layers, got 1: full"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 32},
            "use_sliding_window or sliding_window is not set",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shape(LLAMA_3_1, **changes)
