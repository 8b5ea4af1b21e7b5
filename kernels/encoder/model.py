"""Encoders in plain torch, and what is made of their states; imports no transformers.

The encoder knows neither how its texts lie beside each other nor what is made of its states: a `Layout` is handed in,
and heads come after.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, ModuleList, Parameter, functional

from pliant.kernels.encoder.layout import Bias, Layout, Padded, Stepwise
from pliant.kernels.encoder.relative import by_content, by_distance
from pliant.models.encoder_head import HeadShape, Stage
from pliant.models.encoder_shape import EncoderShape

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "mish": functional.mish,
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}


class Layer(Module):
    """Attention and two linear layers, each added to what it reads and then normed."""

    def __init__(self, shape: EncoderShape, depth: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.activation = _ACTIVATIONS[shape.activation]
        self.qkv = Linear(shape.hidden, 3 * shape.hidden)
        self.output = Linear(shape.hidden, shape.hidden)
        self.attention_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.up = Linear(shape.hidden, shape.intermediate)
        self.down = Linear(shape.intermediate, shape.hidden)
        self.mlp_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.far_keys = self.far_queries = None
        if shape.disentangled:
            size = shape.heads, shape.hidden // shape.heads, 2 * shape.disentangled.buckets
            self.far_keys = Parameter(torch.empty(size)) if "c2p" in shape.disentangled.terms else None
            self.far_queries = Parameter(torch.empty(size)) if "p2c" in shape.disentangled.terms else None

    def forward(self, x: Tensor, layout: Layout, relative: Tensor | Bias | None, firsts: bool) -> Tensor:
        """`x` [tokens, hidden] after this layer; with `firsts` only that of texts' first tokens, which costs less.

        `relative` is the bias of all layers, or the rows of distances (see `by_content`).
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        if isinstance(relative, Tensor):
            relative = by_content(self.far_keys, self.far_queries, relative, layout.longest)
        mixed = layout.attend(q, k, v, relative, None, firsts)
        if firsts:
            x = layout.firsts(x)
        x = self.attention_norm(x + self.output(mixed))
        after: Tensor = self.mlp_norm(x + self.down(self.activation(self.up(x))))
        return after


class RotaryLayer(Module):
    """ModernBERT's: what attention and the gated linear layers read is normed, not what they are added to."""

    def __init__(self, shape: EncoderShape, depth: int) -> None:
        super().__init__()
        assert shape.rotary
        self.heads = shape.heads
        self.activation = _ACTIVATIONS[shape.activation]
        self.local = shape.rotary.local[depth]
        self.window = shape.rotary.window if self.local else None
        self.attention_norm = LayerNorm(shape.hidden, shape.norm_eps, bias=False) if depth else None
        self.qkv = Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.output = Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp_norm = LayerNorm(shape.hidden, shape.norm_eps, bias=False)
        self.up = Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, layout: Layout, turns: tuple[Tensor, Tensor], firsts: bool) -> Tensor:
        """As `Layer.forward`; `turns` are the cosines and sines by which queries and keys are turned."""
        read = x if self.attention_norm is None else self.attention_norm(x)
        q, k, v = self.qkv(read).unflatten(-1, (3, self.heads, -1)).unbind(1)
        mixed = layout.attend(_turned(q, *turns), _turned(k, *turns), v, None, self.window, firsts)
        if firsts:
            x = layout.firsts(x)
        x = x + self.output(mixed)
        value, gate = self.up(self.mlp_norm(x)).chunk(2, -1)
        after: Tensor = x + self.down(self.activation(value) * gate)
        return after


class Encoder(Module):
    """Token ids to states."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = Parameter(torch.empty(shape.vocab, shape.embedding))
        self.positions = Parameter(torch.empty(shape.positions, shape.embedding)) if shape.adds_positions else None
        self.types = Parameter(torch.empty(shape.token_types, shape.embedding)) if shape.token_types > 1 else None
        """What each token type adds beyond what type 0 does, which is in `positions`."""
        self.norm = LayerNorm(shape.embedding, shape.norm_eps, bias=shape.rotary is None)
        self.projection = Linear(shape.embedding, shape.hidden) if shape.embedding != shape.hidden else None
        kind = RotaryLayer if shape.rotary else Layer
        self.layers = ModuleList(kind(shape, depth) for depth in range(shape.layers))
        self.last_norm = LayerNorm(shape.hidden, shape.norm_eps, bias=False) if shape.rotary else None
        reach = 2 * shape.max_length - 1
        self.distances = Parameter(torch.empty(shape.heads, reach)) if shape.bias_buckets else None
        """MPNet's number for each of `relative.distances`."""
        rows = torch.zeros(reach, dtype=torch.int64) if shape.disentangled else None
        self.register_buffer("rows", rows)
        """DeBERTa's embedding for each of `relative.distances`."""

    def forward(self, ids: Tensor, types: Tensor | None, layout: Layout, firsts: bool = False) -> Tensor:
        """The last layer's states [tokens, hidden] of `ids` [tokens]; with `firsts`, [texts, hidden] of first tokens.

        `types` [tokens] tell the two texts of a pair apart; None: all 0, as for a model that has none.
        """
        return self.onward(self.embedded(ids, types, layout), layout, range(self.shape.layers), firsts)

    def embedded(self, ids: Tensor, types: Tensor | None, layout: Layout) -> Tensor:
        """The states [tokens, hidden] that the first layer reads; for the arguments see `forward`."""
        x: Tensor = functional.embedding(ids, self.words)
        if self.positions is not None:
            x = x + functional.embedding(self._places(ids, layout), self.positions)
        if self.types is not None and types is not None:
            x = x + functional.embedding(types, self.types)
        x = self.norm(x)
        return x if self.projection is None else self.projection(x)

    def onward(self, x: Tensor, layout: Layout, layers: range, firsts: bool = False) -> Tensor:
        """The states behind consecutive `layers` of those before them, `x`, which may be of fewer texts than the layers
        before have read; with `firsts`, behind the last layer those of first tokens alone."""
        extras = self._extras(x, layout)
        last = self.shape.layers - 1
        for depth in layers:
            x = self.layers[depth](x, layout, extras[depth], firsts and depth == last)
        if self.last_norm is not None and layers.stop > last:
            x = self.last_norm(x)
        return x

    def _places(self, ids: Tensor, layout: Layout) -> Tensor:
        """Which embedding of a position each token has."""
        if not self.shape.counts_tokens:
            return layout.positions
        counted = ids != self.shape.pad
        return layout.counted(counted) * counted + self.shape.pad

    def _extras(self, x: Tensor, layout: Layout) -> list[object]:
        """What each layer must know of positions."""
        if rotary := self.shape.rotary:
            size = self.shape.hidden // self.shape.heads
            both = [turns(layout.positions, size, theta, x.dtype) for theta in (rotary.theta, rotary.local_theta)]
            return [both[local] for local in rotary.local]
        shared: object = None
        if self.distances is not None:
            shared = by_distance(self.distances, layout.longest)
        elif self.shape.disentangled:
            shared = self.rows
        return [shared] * len(self.layers)


class _StageModule(Module):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.linear = Linear(stage.inputs, stage.outputs, bias=stage.bias)
        self.activation = _ACTIVATIONS[stage.activation]
        self.norm = LayerNorm(stage.outputs, stage.norm_eps, bias=False) if stage.norm_eps is not None else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.linear(x))
        return x if self.norm is None else self.norm(x)


class Head(Module):
    """What is made of texts' states, or of each token's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.stages = ModuleList(_StageModule(stage) for stage in shape.stages)

    @property
    def reads_firsts(self) -> bool:
        """Whether it reads nothing but the states of first tokens."""
        return self.shape.pooling == ("cls",)

    def pooled(self, states: Tensor, layout: Layout) -> Tensor:
        """What `forward` takes, of the states [tokens, hidden] of all tokens."""
        if not self.shape.pooling:
            return states
        found = [layout.pool(states, how) for how in self.shape.pooling]
        return (found[0] if len(found) == 1 else torch.cat(found, 1)).to(states.dtype)

    def forward(self, pooled: Tensor) -> Tensor:
        """float32 [texts or tokens, outputs]."""
        for stage in self.stages:
            pooled = stage(pooled)
        pooled = pooled.float()
        return functional.normalize(pooled, dim=-1) if self.shape.normalized else pooled


class EncoderModel(Module):
    """An encoder and its head."""

    def __init__(self, shape: EncoderShape, head: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.pad = shape.pad
        self.vocabulary = shape.vocab
        self.token_types = shape.token_types
        self.labels_tokens = head.task == "tokens"
        self.encoder = Encoder(shape)
        self.head = Head(head)

    def forward(self, ids: Tensor, types: Tensor | None, layout: Layout) -> Tensor:
        """float32 [texts, outputs] of `ids` [tokens], or [tokens, outputs] if each token has its answer."""
        return self.answers(self.encoder(ids, types, layout, self.head.reads_firsts), layout)

    def answers(self, states: Tensor, layout: Layout) -> Tensor:
        """What the head makes of the states behind the last layer: as `forward`."""
        found: Tensor = self.head(states if self.head.reads_firsts else self.head.pooled(states, layout))
        return found

    def padded(
        self, ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None, *, importance: bool = False
    ) -> Tensor:
        """float32 [texts, outputs] of `ids` [texts, width], or [texts, width, outputs] if each token has its answer.

        `mask` is as `Padded` says, and `types` [texts, width] as `Encoder.forward`. With `importance` that of each
        token comes behind the outputs of its text: [texts, outputs + width].
        """
        layout = (Stepwise if importance else Padded)(ids, mask)
        found: Tensor = self(ids.flatten(), None if types is None else types.flatten(), layout)
        if isinstance(layout, Stepwise):
            return torch.cat([found, layout.received], 1)
        return found if self.head.shape.pooling else found.view(*ids.shape, -1)


def turns(positions: Tensor, size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which heads of `size` numbers are turned at `positions`, each [positions, 1, size / 2]."""
    steps = 1.0 / (theta ** (torch.arange(0, size, 2, device=positions.device, dtype=torch.float) / size))
    angles = positions[:, None].float() * steps
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Each half of `x` [tokens, heads, dim] turned with the other, in float32."""
    one, other = x.float().chunk(2, -1)
    return torch.cat([one * cosines - other * sines, other * cosines + one * sines], -1).to(x.dtype)
