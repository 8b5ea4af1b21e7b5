"""Language models by their shape alone: weights are random."""

from __future__ import annotations

from typing import Any

from pliant.models.decoder_shape import DecoderShape

CONFIGS: dict[str, dict[str, Any]] = {
    "1B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "14B": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
"""Llama 3.2 1B, Llama 3 8B and Qwen3 14B, with positions for longer texts than some of them were trained on."""
_COMMON = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_TINY = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 384,
}


def config(name: str, dry: bool) -> dict[str, Any]:
    """What a config.json of this model says; of a tiny one, whatever the name, if it is `dry`."""
    return _TINY if dry else _COMMON | CONFIGS[name]


def shape(name: str, dry: bool) -> DecoderShape:
    """The same for our kernels."""
    return DecoderShape.from_config(config(name, dry))
