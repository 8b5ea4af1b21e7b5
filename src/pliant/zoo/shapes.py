"""The zoo's models by name: their shapes and how long they learn. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Any

from pliant.zoo.corpus import LABELS

VERSION = 1
"""Raised whenever texts, shapes or training change, so that models of an older zoo are left alone."""


@dataclass(frozen=True)
class Shape:
    """A BERT encoder and its training: `epochs` over the paragraphs at a peak `learning_rate`."""

    layers: int
    hidden: int
    heads: int
    epochs: int
    learning_rate: float
    vocabulary: int = 3000
    positions: int = 512


SHAPES = {
    "topics-small": Shape(layers=2, hidden=128, heads=2, epochs=5, learning_rate=1.5e-3),
    "topics-large": Shape(layers=4, hidden=256, heads=4, epochs=8, learning_rate=1e-3),
}


def config(shape: Shape) -> dict[str, Any]:
    """The `config.json` of a model of this shape, as `transformers.BertConfig` takes it."""
    return {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.hidden,
        "max_position_embeddings": shape.positions,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: index for index, label in enumerate(LABELS)},
    }
