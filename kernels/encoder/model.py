"""Encoders of BERT's kind in plain torch, and the classifiers on top of them; imports no transformers.

The encoder knows neither how its texts lie beside each other nor what is made of its states: attention is handed in
(`attention`), and heads come after.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, ModuleList, Parameter, functional

from pliant.kernels.encoder.attention import Attention, Fused, Stepwise
from pliant.models.encoder_shape import EncoderShape

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "mish": functional.mish,
}
_HEAD_ACTIVATIONS = {"bert": "tanh", "roberta": "tanh", "distilbert": "relu", "electra": "gelu"}


class Layer(Module):
    """Attention and two linear layers, each added to what it reads and then normed."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.activation = _ACTIVATIONS[shape.activation]
        self.qkv = Linear(shape.hidden, 3 * shape.hidden)
        self.output = Linear(shape.hidden, shape.hidden)
        self.attention_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.up = Linear(shape.hidden, shape.intermediate)
        self.down = Linear(shape.intermediate, shape.hidden)
        self.mlp_norm = LayerNorm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor, attention: Attention, kept: int | None = None) -> Tensor:
        """`x` [n, tokens, hidden] after this layer; with `kept` only so many first tokens of it, which costs less."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = attention(q, k, v, kept).transpose(1, 2).flatten(2)
        x = self.attention_norm(x[:, :kept] + self.output(mixed))
        after: Tensor = self.mlp_norm(x + self.down(self.activation(self.up(x))))
        return after


class Encoder(Module):
    """Token ids to states."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = Parameter(torch.empty(shape.vocab, shape.embedding))
        self.positions = Parameter(torch.empty(shape.positions, shape.embedding))
        """What token type 0 adds to every token is in it."""
        self.norm = LayerNorm(shape.embedding, shape.norm_eps)
        self.projection = Linear(shape.embedding, shape.hidden) if shape.embedding != shape.hidden else None
        self.layers = ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, ids: Tensor, attention: Attention, kept: int | None = None) -> Tensor:
        """The last layer's states [n, tokens, hidden] of `ids` [n, tokens]; with `kept`, of so many first tokens."""
        x: Tensor = self.norm(functional.embedding(ids, self.words) + self._positions_of(ids))
        if self.projection is not None:
            x = self.projection(x)
        last = len(self.layers) - 1
        for depth, layer in enumerate(self.layers):
            x = layer(x, attention, kept if depth == last else None)
        return x

    def _positions_of(self, ids: Tensor) -> Tensor:
        if not self.shape.counts_tokens:
            return self.positions[: ids.shape[1]]
        counted = ids != self.shape.pad
        return functional.embedding(counted.cumsum(1) * counted + self.shape.pad, self.positions)


class Head(Module):
    """A classifier of texts by the state of their first token."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.dense = Linear(shape.hidden, shape.hidden)
        self.activation = _ACTIVATIONS[_HEAD_ACTIVATIONS[shape.family]]
        self.out = Linear(shape.hidden, shape.labels)

    def forward(self, first: Tensor) -> Tensor:
        """float32 [n, labels] of [n, hidden]."""
        logits: Tensor = self.out(self.activation(self.dense(first)))
        return logits.float()


class EncoderClassifier(Module):
    """An encoder and its head. `importance` tells whether `forward` gives that of each token too."""

    def __init__(self, shape: EncoderShape, *, importance: bool = False) -> None:
        super().__init__()
        self.importance = importance
        self.pad = shape.pad
        self.vocabulary = shape.vocab
        self.encoder = Encoder(shape)
        self.head = Head(shape)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """float32 [n, labels] of `ids` [n, tokens], or [n, labels + tokens] with importance.

        `mask` [n, tokens] is 1 for texts' tokens and 0 for padding; without one, nothing is padded, which is faster.
        """
        attention = Stepwise(ids, mask) if self.importance else Fused(mask)
        logits = self.head(self.encoder(ids, attention, kept=1)[:, 0])
        return torch.cat([logits, attention.received], 1) if isinstance(attention, Stepwise) else logits
