"""What a config.json says of an encoder of BERT's kind: the shapes and constants that its kernels need.

BERT, RoBERTa (XLM-RoBERTa and CamemBERT are the same), DistilBERT and ELECTRA are one architecture with switches. A
config that asks for anything beyond these has no shape: whoever serves the model leaves it to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA = {**_BERT, "pad_token_id": 1}
_ELECTRA = {**_BERT, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128}
_DISTILBERT_FIXED = {"type_vocab_size": 0, "layer_norm_eps": 1e-12}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_ROBERTA, "vocab_size": 50265},
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": _ELECTRA,
    "distilbert": {**_BERT, "num_hidden_layers": 6},
}
"""By model type: what transformers takes for a key that a config leaves out."""
_FAMILIES = {"xlm-roberta": "roberta", "camembert": "roberta"}
_DISTILBERT_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_COUNTS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "mish": "mish",
}
"""What a config calls an activation, and what it is called here: some have many names."""


@dataclass(frozen=True)
class EncoderShape:
    """The shape of an encoder of BERT's kind and of its classifier. Sizes count elements."""

    family: str
    """bert, roberta, distilbert or electra: how its weights are named, and what its classifier is."""
    layers: int
    hidden: int
    heads: int
    intermediate: int
    embedding: int
    """The width of token embeddings; where it is not `hidden`, they are projected to that."""
    vocab: int
    positions: int
    token_types: int
    """0 if it tells no first text of a pair from the second."""
    labels: int
    activation: str
    """gelu, gelu_tanh, quick_gelu, relu, silu, tanh or mish."""
    norm_eps: float
    pad: int
    counts_tokens: bool
    """Positions count the tokens that are no padding, from `pad` + 1 on, as RoBERTa's do; else they count from 0."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> EncoderShape | None:
        """The encoder that a config.json, as transformers writes it, describes; None if it is of another kind."""
        kind = config.get("model_type")
        if kind not in _DEFAULTS or _asks_for_more(config):
            return None
        if kind == "distilbert":
            config = {_DISTILBERT_KEYS.get(key, key): value for key, value in config.items()} | _DISTILBERT_FIXED
        config = {**_DEFAULTS[kind], **config}
        counts = {name: config[key] for name, key in _COUNTS.items()}
        counts["embedding"] = config["embedding_size" if kind == "electra" else "hidden_size"]
        activation = _ACTIVATIONS.get(str(config["hidden_act"]))
        counted = all(isinstance(count, int) and count > 0 for count in counts.values())
        if not counted or counts["hidden"] % counts["heads"] or activation is None:
            return None
        family = _FAMILIES.get(kind, kind)
        pad = config["pad_token_id"]
        return cls(
            family=family,
            **counts,
            token_types=config["type_vocab_size"],
            labels=len(config.get("id2label") or range(config.get("num_labels", 2))),
            activation=activation,
            norm_eps=float(config["layer_norm_eps"]),
            pad=_DEFAULTS[kind]["pad_token_id"] if pad is None else pad,
            counts_tokens=family == "roberta",
        )


def _asks_for_more(config: Mapping[str, Any]) -> bool:
    """Whether it has what these encoders have only in part: relative positions, causal attention, other weights."""
    relative = config.get("position_embedding_type") not in (None, "absolute")
    return relative or any(config.get(key) for key in ("is_decoder", "pruned_heads", "quantization_config"))
