"""The zoo's models and adapters by name: their shapes and how long they learn. Nothing here imports torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pliant.models.lora_layout import MODULES
from pliant.zoo import corpus, library

Progress = Callable[[str, float], object]
"""Called with what is being done and the fraction done."""

BEGIN, END, SYSTEM, USER, ASSISTANT = range(5)
"""The language model's special tokens, by id: where texts begin, where they and chat messages end, and who speaks."""


GROUPS = ("0 or 5", "1 or 6", "2 or 7", "3 or 8", "4 or 9")
"""What the vision transformer tells apart: digits by their remainder of a division by five."""
DIGITS_SIDE = 32
"""Pixels of an image's height and width."""
ATTENTION = MODULES[:4]
"""The linear layers of attention: queries, keys, values and output."""


_MODULES = "sentence_transformers.models"


@dataclass(frozen=True)
class Shape:
    """A BERT encoder and its training: `epochs` over the texts at a peak `learning_rate`."""

    layers: int
    hidden: int
    heads: int
    epochs: int
    learning_rate: float
    vocabulary: int = 3000
    positions: int = 512
    version: int = 1
    """Raised whenever texts, shape or training change, so that models of an older zoo are left alone."""
    windows: int = 40
    """Of several texts in a row, in each epoch."""
    labels: tuple[str, ...] = corpus.LABELS

    def config(self) -> dict[str, Any]:
        """The `config.json` of a model of this shape, as `transformers.BertConfig` takes it."""
        return {
            "architectures": ["BertForSequenceClassification"],
            "model_type": "bert",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.hidden,
            "max_position_embeddings": self.positions,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pad_token_id": 0,
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }


@dataclass(frozen=True)
class PairShape:
    """A BERT encoder of one layer and two heads that scores pairs of texts, and its training: `steps` batches at a peak
    `learning_rate`. Its words begin as those of the classifier `of`, which has as many of the same size."""

    of: str
    hidden: int
    steps: int
    learning_rate: float
    vocabulary: int = 3000
    positions: int = 512
    version: int = 1

    def config(self) -> dict[str, Any]:
        """The `config.json` of a model of this shape, as `transformers.BertConfig` takes it."""
        encoder = Shape(1, self.hidden, 2, 0, 0.0, self.vocabulary, self.positions).config()
        return {**encoder, "id2label": {0: "related"}, "label2id": {"related": 0}}


@dataclass(frozen=True)
class EmbeddingShape:
    """A text classifier of the zoo, `of` which the states are taken instead of the labels; nothing is trained."""

    of: str
    pooling: str
    """As sentence-transformers calls it."""
    version: int = 1

    def config(self) -> dict[str, Any]:
        """That of the classifier."""
        return SHAPES[self.of].config()

    def modules(self) -> dict[str, Any]:
        """What sentence-transformers' files say, by their names."""
        kinds = ("Transformer", "Pooling", "Normalize")
        listed = [
            {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"{_MODULES}.{kind}"}
            for index, kind in enumerate(kinds)
        ]
        pooling = {"word_embedding_dimension": self.config()["hidden_size"], f"pooling_mode_{self.pooling}": True}
        return {"modules.json": listed, "1_Pooling/config.json": pooling}


@dataclass(frozen=True)
class LlamaShape:
    """A Llama decoder and its training: `steps` batches at a peak `learning_rate`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    steps: int
    learning_rate: float
    vocabulary: int = 2048
    positions: int = 1024
    version: int = 1

    def config(self) -> dict[str, Any]:
        """The `config.json` of a model of this shape, as `transformers.LlamaConfig` takes it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": False,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
        }


@dataclass(frozen=True)
class VitShape:
    """A vision transformer without class token and its training: `epochs` over the digits at a peak `learning_rate`."""

    layers: int
    hidden: int
    heads: int
    epochs: int
    learning_rate: float
    patch: int = 4
    mlp_ratio: float = 2.0
    version: int = 1

    def config(self) -> dict[str, Any]:
        """The `config.json` of a model of this shape, as timm reads it."""
        return {
            "architecture": "vit_tiny_patch16_224",
            "num_classes": len(GROUPS),
            "num_features": self.hidden,
            "global_pool": "avg",
            "label_names": list(GROUPS),
            "model_args": {
                "img_size": DIGITS_SIDE,
                "patch_size": self.patch,
                "embed_dim": self.hidden,
                "depth": self.layers,
                "num_heads": self.heads,
                "mlp_ratio": self.mlp_ratio,
                "class_token": False,
                "global_pool": "avg",
            },
            "pretrained_cfg": {
                "input_size": [3, DIGITS_SIDE, DIGITS_SIDE],
                "fixed_input_size": True,
                "interpolation": "bicubic",
                "crop_pct": 1.0,
                "mean": [0.5] * 3,
                "std": [0.5] * 3,
                "first_conv": "patch_embed.proj",
                "classifier": "head",
            },
        }


@dataclass(frozen=True)
class TaskShape:
    """A task on the digits and its training: `epochs` for each of `gammas` prompts at a peak `learning_rate`.

    Both suit a small model that has a minute: few epochs in large steps.
    """

    epochs: int
    learning_rate: float
    batch: int = 16
    gammas: tuple[int, ...] = (2, 4, 8)


@dataclass(frozen=True)
class AdapterShape:
    """A LoRA adapter of the language model `BASE` and its training: a peak `learning_rate`."""

    part: str
    """Of the standard library, see `docstrings`."""
    rank: int
    modules: tuple[str, ...]
    alpha: int
    learning_rate: float
    rank_stabilised: bool = False
    """Scaled by alpha / sqrt(rank) instead of alpha / rank."""

    @property
    def scaling(self) -> float:
        """What it computes is multiplied by that."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def config(self) -> dict[str, Any]:
        """Its `adapter_config.json`, as PEFT's `LoraConfig` takes it."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": f"zoo/{BASE}",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rank_stabilised,
            "target_modules": list(self.modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }


SHAPES: dict[str, Shape | PairShape | EmbeddingShape | LlamaShape | VitShape] = {
    "topics-small": Shape(layers=2, hidden=128, heads=2, epochs=5, learning_rate=1.5e-3, version=3),
    "topics-large": Shape(layers=4, hidden=256, heads=4, epochs=10, learning_rate=1e-3, version=3),
    "topics-embedding": EmbeddingShape("topics-large", "cls_token"),
    "topics-pairs": PairShape("topics-small", hidden=128, steps=300, learning_rate=1e-3, version=2),
    "library": Shape(
        layers=1, hidden=128, heads=2, epochs=6, learning_rate=2e-3, windows=4, version=2, labels=library.LABELS
    ),
    "tiny-llama": LlamaShape(
        layers=4, hidden=256, heads=4, kv_heads=2, intermediate=704, steps=330, learning_rate=4e-3, version=4
    ),
    "digits-vit": VitShape(layers=4, hidden=48, heads=3, epochs=8, learning_rate=2e-3),
}

BASE = "tiny-llama"
"""The model that the adapters are for."""
ADAPTERS = {
    f"{shape.part}-{shape.rank}": shape
    for shape in (
        AdapterShape("logging", 8, MODULES, alpha=16, learning_rate=6e-3),
        AdapterShape("email", 16, ATTENTION, alpha=32, learning_rate=6e-3),
        AdapterShape("asyncio", 32, MODULES, alpha=32, learning_rate=4e-3),
        AdapterShape("unittest", 64, MODULES, alpha=16, learning_rate=2e-3, rank_stabilised=True),
        AdapterShape("decimal", 128, ATTENTION, alpha=128, learning_rate=2e-3),
    )
}
"""By name: part and rank."""
ADAPTER_STEPS = 240
"""Batches that all learn from, side by side."""
ADAPTERS_VERSION = 3
"""Raised whenever their texts, shapes or training change."""

BACKBONE = "digits-vit"
"""The model that the tasks are for."""
TASKS = {
    "digit": TaskShape(epochs=3, learning_rate=0.1),
    "parity": TaskShape(epochs=3, learning_rate=0.2),
    "at-least-five": TaskShape(epochs=3, learning_rate=0.2),
}
"""By the names that `digits` has for them."""
TASKS_VERSION = 3
"""Raised whenever their images, shapes or training change."""
