"""Tiny random decoders of every family, saved as transformers saves them, and what transformers answers with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pliant.torchvision_ops import declare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1000.0}
_SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-yarn": ("Qwen2", {**_SLIDING, "rope_parameters": _YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-8-heads": (
        "Qwen3",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True},
    ),
    "qwen3-window-biased": ("Qwen3", {**_SLIDING, "head_dim": 8, "attention_bias": True}),
}
"""By name: transformers' prefix of the classes, and how the config differs from the tiny standard."""


def make(name: str, seed: int = 0, sizes: dict[str, int] | None = None) -> PreTrainedModel:
    """A random decoder; its biases and norms are random too, so that leaving one out shows. `sizes` are other ones."""
    declare()
    import transformers

    prefix, changes = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(
        **{**_SIZES, **changes, **(sizes or {})}, attn_implementation="eager"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def save(name: str, folder: Path, seed: int = 0, sizes: dict[str, int] | None = None, **how: Any) -> PreTrainedModel:
    """Make a decoder and save it in `folder`; `how` goes to save_pretrained."""
    model = make(name, seed, sizes)
    model.save_pretrained(folder, **how)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """What `save` wrote, in another dtype; unlike a model that is cast, with its RoPE still in float32."""
    declare()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """What transformers computes for a whole text at once, [tokens, vocab]."""
    found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """The answer of `tokens` tokens that transformers' own greedy decoding gives."""
    model.generation_config.eos_token_id = None
    answer = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones(1, len(prompt))
    )
    found: list[int] = answer[0, len(prompt) :].tolist()
    return found


@torch.no_grad()
def perplexity(model: Any, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """What transformers' `model` makes of a token of `texts`, given those before it in as many as it has places for."""
    model.eval()
    longest, losses, count = model.config.max_position_embeddings, 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text).ids
        for row in (ids[start : start + longest] for start in range(0, len(ids) - 1, longest)):
            given = torch.tensor([row])
            losses += float(model(input_ids=given, labels=given).loss) * (len(row) - 1)
            count += len(row) - 1
    return math.exp(losses / count)
