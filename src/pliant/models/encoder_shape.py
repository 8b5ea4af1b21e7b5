"""What a config.json says of an encoder: the shapes and constants that its kernels need.

BERT, RoBERTa (XLM-RoBERTa and CamemBERT are the same), DistilBERT, ELECTRA, MPNet and DeBERTa (v2 and v3) are one
architecture with switches, ModernBERT is another. A config that asks for anything beyond these has no shape: whoever
serves the model leaves it to transformers.
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
_MPNET = {**_BERT, "vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32}
_DEBERTA = {
    **_BERT,
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "position_biased_input": True,
}
_MODERNBERT = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
    "pad_token_id": 50283,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}
_DISTILBERT_FIXED = {"type_vocab_size": 0, "layer_norm_eps": 1e-12}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_ROBERTA, "vocab_size": 50265},
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": _ELECTRA,
    "distilbert": {**_BERT, "num_hidden_layers": 6},
    "mpnet": _MPNET,
    "deberta-v2": _DEBERTA,
    "modernbert": _MODERNBERT,
}
"""By model type: what transformers takes for a key that a config leaves out."""
_FAMILIES = {"xlm-roberta": "roberta", "camembert": "roberta", "deberta-v2": "deberta"}
_MPNET_FIXED = {"pad_token_id": 1, "type_vocab_size": 0}
"""Whatever its config says, MPNet counts positions from the token 1."""
_MODERNBERT_KEYS = {"hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps"}
_MODERNBERT_FIXED = {"type_vocab_size": 0}
_MODERNBERT_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
_MPNET_BUCKETS = 32
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
class Disentangled:
    """DeBERTa's relative positions: every layer scores how content attends to distances, and distances to content."""

    reach: int
    """Distances beyond which all count alike."""
    buckets: int
    """Half the number of distances that are told apart; those that are farther than half of it share one by
    logarithm. `reach` where none do."""
    terms: tuple[str, ...]
    """Of c2p and p2c, those that are there."""
    shared: bool
    """Whether distances go through the same projections as tokens."""
    normed: bool
    """Whether the embeddings of distances are normed first."""


@dataclass(frozen=True)
class Rotary:
    """ModernBERT's positions: queries and keys are turned, and most layers attend to what is near."""

    theta: float
    """Of layers that attend to all tokens."""
    local_theta: float
    window: int
    """How many tokens to either side the other layers attend to."""
    local: tuple[bool, ...]
    """By layer: whether it attends to what is near only."""


@dataclass(frozen=True)
class EncoderShape:
    """The shape of an encoder. Sizes count elements."""

    family: str
    """bert, roberta, distilbert, electra, mpnet, deberta or modernbert: how its weights are named."""
    layers: int
    hidden: int
    heads: int
    intermediate: int
    embedding: int
    """The width of token embeddings; where it is not `hidden`, they are projected to that."""
    vocab: int
    positions: int
    """Tokens of the longest text, and as many more as positions begin above 0."""
    token_types: int
    """0 if it tells no first text of a pair from the second."""
    activation: str
    """gelu, gelu_tanh, quick_gelu, relu, silu, tanh or mish."""
    norm_eps: float
    pad: int
    counts_tokens: bool
    """Positions count the tokens that are no padding, from `pad` + 1 on, as RoBERTa's do; else they count from 0."""
    adds_positions: bool
    """Whether each position has an embedding, which is added to the token's."""
    bias_buckets: int = 0
    """MPNet: so many classes of distances, of which each adds its own number to the scores of every layer."""
    disentangled: Disentangled | None = None
    rotary: Rotary | None = None

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        return self.positions - (self.pad + 1 if self.counts_tokens else 0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> EncoderShape | None:
        """The encoder that a config.json, as transformers writes it, describes; None if it is of another kind."""
        kind = config.get("model_type")
        if kind not in _DEFAULTS or _asks_for_more(config):
            return None
        if kind == "distilbert":
            config = {_DISTILBERT_KEYS.get(key, key): value for key, value in config.items()} | _DISTILBERT_FIXED
        config = {**_DEFAULTS[kind], **config}
        if kind == "mpnet":
            config = config | _MPNET_FIXED
        if kind == "modernbert":
            config = {_MODERNBERT_KEYS.get(key, key): value for key, value in config.items()} | _MODERNBERT_FIXED
        counts = {name: config[key] for name, key in _COUNTS.items()}
        counts["embedding"] = config["embedding_size" if kind == "electra" else "hidden_size"]
        activation = _ACTIVATIONS.get(str(config["hidden_act"]))
        counted = all(isinstance(count, int) and count > 0 for count in counts.values())
        if not counted or counts["hidden"] % counts["heads"] or activation is None:
            return None
        extra: dict[str, Any] = {}
        if kind in _EXTRAS:
            found = _EXTRAS[kind](config)
            if found is None:
                return None
            extra = found
        pad = config["pad_token_id"]
        return cls(
            family=_FAMILIES.get(kind, kind),
            **counts,
            token_types=config["type_vocab_size"],
            activation=activation,
            norm_eps=float(config["layer_norm_eps"]),
            pad=_DEFAULTS[kind]["pad_token_id"] if pad is None else pad,
            counts_tokens=_FAMILIES.get(kind, kind) in ("roberta", "mpnet"),
            adds_positions=kind != "modernbert" and bool(config.get("position_biased_input", True)),
            **extra,
        )


def activation(name: Any) -> str | None:
    """What is called `name` in a config, by the one name that it has here; None if it is not known."""
    return _ACTIVATIONS.get(str(name))


def _asks_for_more(config: Mapping[str, Any]) -> bool:
    """Whether it has what these encoders have only in part: relative positions, causal attention, other weights."""
    relative = config.get("position_embedding_type") not in (None, "absolute")
    return relative or any(config.get(key) for key in ("is_decoder", "pruned_heads", "quantization_config"))


def _mpnet(config: Mapping[str, Any]) -> dict[str, Any] | None:
    buckets = config["relative_attention_num_buckets"]
    return {"bias_buckets": buckets} if buckets == _MPNET_BUCKETS else None


def _deberta(config: Mapping[str, Any]) -> dict[str, Any] | None:
    hidden = config["hidden_size"]
    as_usual = {"embedding_size": hidden, "pooler_hidden_size": hidden, "conv_kernel_size": 0}
    as_usual["attention_head_size"] = hidden // config["num_attention_heads"]
    terms = config.get("pos_att_type") or []
    terms = [term.strip() for term in terms.lower().split("|")] if isinstance(terms, str) else list(terms)
    unusual = any(config.get(key, usual) != usual for key, usual in as_usual.items())
    unusual = unusual or bool(config["type_vocab_size"] and not config["position_biased_input"])
    if unusual or not config.get("relative_attention") or not terms or not set(terms) <= {"c2p", "p2c"}:
        return None
    reach = config.get("max_relative_positions", -1)
    reach = config["max_position_embeddings"] if reach < 1 else reach
    buckets = config.get("position_buckets", -1)
    normed = "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower().split("|")
    shared = bool(config.get("share_att_key"))
    found = Disentangled(reach, buckets if buckets > 0 else reach, tuple(sorted(terms)), shared, normed)
    return {"disentangled": found}


def _modernbert(config: Mapping[str, Any]) -> dict[str, Any] | None:
    if any(config.get(key) for key in _MODERNBERT_BIASES):
        return None
    ropes = config.get("rope_parameters") or {}
    full, near = (ropes.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    if any(rope.get("rope_type", "default") != "default" for rope in (full, near)) or config.get("rope_scaling"):
        return None
    every = config["global_attn_every_n_layers"]
    usual = ["sliding_attention" if layer % every else "full_attention" for layer in range(config["num_hidden_layers"])]
    found = Rotary(
        theta=float(full.get("rope_theta", config["global_rope_theta"])),
        local_theta=float(near.get("rope_theta", config["local_rope_theta"])),
        window=config["local_attention"] // 2,
        local=tuple(kind == "sliding_attention" for kind in config.get("layer_types") or usual),
    )
    return {"rotary": found}


_EXTRAS = {"mpnet": _mpnet, "deberta-v2": _deberta, "modernbert": _modernbert}
