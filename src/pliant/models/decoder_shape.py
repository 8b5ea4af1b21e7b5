"""What a config.json says of a Llama-family decoder: the shapes and constants that its kernels need.

Llama 2 and 3, Mistral, Qwen2 and Qwen3 are one architecture with switches: biases, q/k norms, tied embeddings, sliding
windows, and several ways to stretch rotary positions (RoPE). Whatever a config asks for beyond these is refused here,
before any weight is read, because a decoder that ignored it would answer nonsense with confidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Quantize = Literal["int8", "fp8"]
"""What the weights of linear layers are kept as; with fp8 keys and values, too."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"eos_token_id": 2},
    "MistralForCausalLM": {"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
"""What transformers takes for a key that a config leaves out, where that differs by architecture."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions: how fast each pair of a head's dimensions turns.

    `kind` is one of "default", "linear", "llama3" and "yarn"; fields that a kind does not use keep their defaults. All
    lengths are in tokens.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    """The longest text that the model was trained on before it was stretched (llama3, yarn)."""
    low_frequency: float = 1.0
    high_frequency: float = 1.0
    """llama3: wavelengths above original_length / low_frequency are stretched, below original_length / high_frequency
    kept, and blended between."""
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    """yarn: dimensions that turn more often than `fast_turns` in the original length are kept, those that turn less
    often than `slow_turns` stretched."""
    truncate: bool = True
    """yarn: round the bounds between the two to whole dimensions."""
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """yarn: what cosines and sines are multiplied with, or the numbers it follows from."""


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a Llama-family decoder. Sizes count elements, `max_length` and `windows` tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    max_length: int
    rope: Rope
    qk_norm: bool
    """RMS norms on every head's query and key (Qwen3)."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    """The output head is the embedding."""
    windows: tuple[int | None, ...]
    """By layer: how many tokens, its own included, a token attends to; None for all before it."""
    eos: tuple[int, ...]
    """Tokens that end an answer; () if the config names none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderShape:
        """The decoder that a config.json, as transformers writes it, describes.

        Raises ValueError that says what the config asks for and what is supported.
        """
        architecture = next(iter(config.get("architectures") or ["nothing"]))
        if architecture not in ARCHITECTURES:
            raise ValueError(f"its architecture is {architecture}; choose one of {', '.join(ARCHITECTURES)}")
        config = {**_DEFAULTS[architecture], **config}
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "an unnamed method")
            raise ValueError(f"its weights are quantized ({method}); choose the float32, bfloat16 or float16 original")
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ValueError(f"its activation is {activation}; only silu is supported")
        layers, hidden, heads = (
            _count(config, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        kv_heads = _count(config, "num_key_value_heads", heads)
        head_dim = _count(config, "head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise ValueError(
                f"it has {heads} attention heads of {head_dim} dimensions over {kv_heads} key/value heads; heads must "
                "be a multiple of key/value heads, and dimensions even"
            )
        max_length = _count(config, "max_position_embeddings")
        llama, qwen2, qwen3 = (architecture.startswith(name) for name in ("Llama", "Qwen2", "Qwen3"))
        attention_bias = (llama or qwen3) and bool(config.get("attention_bias"))
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=_count(config, "intermediate_size"),
            vocab=_count(config, "vocab_size"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_length=max_length,
            rope=_rope(config, max_length),
            qk_norm=qwen3,
            qkv_bias=qwen2 or attention_bias,
            output_bias=attention_bias,
            mlp_bias=llama and bool(config.get("mlp_bias")),
            tied=bool(config.get("tie_word_embeddings")),
            windows=tuple(
                window if window and window < max_length else None for window in _windows(config, architecture, layers)
            ),
            eos=_eos(config.get("eos_token_id")),
        )

    def of_rank(self, ranks: int) -> DecoderShape:
        """What each of `ranks` processes has of it that compute it together: of heads and of the MLP's width a part.

        Raises ValueError where they cannot be split evenly.
        """
        if self.heads % ranks or self.kv_heads % ranks or self.intermediate % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share {self.heads} heads, {self.kv_heads} key/value heads and an MLP of width "
                f"{self.intermediate} evenly; choose a number that divides all three"
            )
        heads, kv_heads, intermediate = (n // ranks for n in (self.heads, self.kv_heads, self.intermediate))
        return replace(self, heads=heads, kv_heads=kv_heads, intermediate=intermediate)

    @property
    def queries(self) -> int:
        """The width of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """The width of queries, keys and values of one token together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def kv_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """What the keys and values of `tokens` tokens take, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value * tokens

    def parameters(self) -> int:
        """How many numbers the weights have; a tied head counts once."""
        attention = self.hidden * self.qkv + self.queries * self.hidden
        biases = self.qkv_bias * self.qkv + self.output_bias * self.hidden
        mlp = 3 * self.hidden * self.intermediate + self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + biases + mlp + norms) + embeddings + self.hidden

    def weight_bytes(self, dtype_bytes: int, quantize: Quantize | None) -> int:
        """What the weights take, a byte each but for the embedding's if quantized; a tied head counts once."""
        embedding = self.vocab * self.hidden
        return embedding * dtype_bytes + (self.parameters() - embedding) * (1 if quantize else dtype_bytes)


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"its {key} must be a positive whole number, got {value!r}; is its config.json complete?")
    return value


def _eos(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer, Qwen in those its config names, Llama in none."""
    if architecture.startswith("Llama"):
        return (None,) * layers
    if architecture.startswith("Mistral"):
        return (config["sliding_window"],) * layers
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    first = layers if window is None else config["max_window_layers"]
    kinds = config.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"its layer_types must be full_attention or sliding_attention for each of {layers} layers, got "
            f"{len(kinds)}: {', '.join(sorted(set(map(str, kinds))))}"
        )
    if "sliding_attention" in kinds and window is None:
        raise ValueError("its layer_types name sliding_attention, but use_sliding_window or sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Mapping[str, Any], max_length: int) -> Rope:
    """RoPE as transformers 5 writes it (`rope_parameters`) or as it was before (`rope_theta` and `rope_scaling`)."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("its rope_parameters differ by layer type; only one RoPE for all layers is supported")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"its partial_rotary_factor is {partial}; only models that rotate whole heads are supported")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(f"its RoPE is of type {kind}; choose a model with one of {', '.join(ROPE_KINDS)}")
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind in ("default", "dynamic"):  # dynamic RoPE stretches nothing up to max_length, and no text is longer
        return Rope(theta)
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = original or max_length
    factor = given.get("factor")
    if factor is None and kind == "yarn":
        factor = max_length / original
    needed: dict[str, Any] = {"factor": factor}
    if kind == "llama3":
        needed |= {key: given.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    if missing := [key for key, value in needed.items() if not isinstance(value, int | float) or value <= 0]:
        raise ValueError(f"its {kind} RoPE needs positive numbers for {' and '.join(missing)}")
    rope = Rope(theta, kind, needed["factor"], original)
    if kind == "linear":
        return rope
    if kind == "llama3":
        return replace(rope, low_frequency=needed["low_freq_factor"], high_frequency=needed["high_freq_factor"])
    return replace(
        rope,
        fast_turns=given.get("beta_fast") or 32.0,
        slow_turns=given.get("beta_slow") or 1.0,
        truncate=bool(given.get("truncate", True)),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
    )
