"""What a Llama decoder computes, as it learns: transformers' own model takes three times as long for one as small.

Its weights go by the names that transformers gives them.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pliant.zoo.shapes import LlamaShape

EMBEDDING, HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_DEVIATION = 0.02
_EPSILON = 1e-6
_THETA = 10000.0

Linear = Callable[[str, Tensor], Tensor]
"""What the linear layer of a name makes of its input [..., in]."""


def prefix(layer: int) -> str:
    """How the names of a layer's weights begin."""
    return f"model.layers.{layer}."


class Decoder:
    """A decoder of `shape`: `weights` by their names."""

    def __init__(self, shape: LlamaShape, weights: dict[str, Tensor]) -> None:
        self.shape = shape
        self.weights = weights

    @classmethod
    def random(cls, shape: LlamaShape) -> "Decoder":
        """One that has learned nothing."""
        size, width = shape.hidden, shape.hidden // shape.heads
        queries, keys = (heads * width for heads in (shape.heads, shape.kv_heads))
        layer = {
            "self_attn.q_proj": (queries, size),
            "self_attn.k_proj": (keys, size),
            "self_attn.v_proj": (keys, size),
            "self_attn.o_proj": (size, queries),
            "mlp.gate_proj": (shape.intermediate, size),
            "mlp.up_proj": (shape.intermediate, size),
            "mlp.down_proj": (size, shape.intermediate),
        }
        sizes = {EMBEDDING: (shape.vocabulary, size), HEAD: (shape.vocabulary, size)}
        norms = [_NORM]
        for index in range(shape.layers):
            sizes |= {f"{prefix(index)}{name}.weight": given for name, given in layer.items()}
            norms += [f"{prefix(index)}{name}_layernorm.weight" for name in ("input", "post_attention")]
        weights = {name: torch.randn(given) * _DEVIATION for name, given in sizes.items()}
        return cls(shape, weights | {name: torch.ones(size) for name in norms})

    @classmethod
    def load(cls, shape: LlamaShape, folder: Path) -> "Decoder":
        """The one that was saved to `folder`."""
        return cls(shape, load_file(folder / "model.safetensors"))

    def states(self, ids: Tensor, layers: int | None = None, linear: Linear | None = None) -> Tensor:
        """What the head is given [rows, length, hidden] of ids [rows, length], by the first `layers` of the layers.

        `linear` takes the place of what the layers' linear layers compute.
        """
        compute = linear or self.linear
        x = functional.embedding(ids, self.weights[EMBEDDING])
        turns = self._turns(ids.shape[1])
        for index in range(self.shape.layers if layers is None else layers):
            name = prefix(index)
            x = x + self._attention(name, self._norm(f"{name}input_layernorm.weight", x), turns, compute)
            x = x + _gated(f"{name}mlp.", self._norm(f"{name}post_attention_layernorm.weight", x), compute)
        return self._norm(_NORM, x)

    def loss(self, states: Tensor, targets: Tensor, learned: Tensor) -> Tensor:
        """Mean cross entropy of the next token: `learned` [rows, length] says of which targets (ids) it counts."""
        counts = learned[:, 1:]
        return functional.cross_entropy(self.linear("lm_head", states[:, :-1][counts]), targets[:, 1:][counts])

    def linear(self, name: str, x: Tensor) -> Tensor:
        """That of `name` as the weights say."""
        return functional.linear(x, self.weights[f"{name}.weight"])

    def turning(self) -> Tensor:
        """By how much each pair of a head's dimensions is turned from one position to the next."""
        width = self.shape.hidden // self.shape.heads
        return 1 / _THETA ** (torch.arange(0, width, 2) / width)

    def _turns(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length)[:, None] * self.turning()
        return angles.cos(), angles.sin()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], _EPSILON)

    def _attention(self, name: str, x: Tensor, turns: tuple[Tensor, Tensor], linear: Linear) -> Tensor:
        width, groups = self.shape.hidden // self.shape.heads, self.shape.heads // self.shape.kv_heads
        query, key, value = (
            linear(f"{name}self_attn.{each}_proj", x).view(*x.shape[:-1], -1, width).transpose(1, 2) for each in "qkv"
        )
        key, value = (each.repeat_interleave(groups, 1) for each in (_turned(key, *turns), value))
        found = functional.scaled_dot_product_attention(_turned(query, *turns), key, value, is_causal=True)
        return linear(f"{name}self_attn.o_proj", found.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def _gated(name: str, x: Tensor, linear: Linear) -> Tensor:
    gate = functional.silu(linear(f"{name}gate_proj", x))
    return linear(f"{name}down_proj", gate * linear(f"{name}up_proj", x))
