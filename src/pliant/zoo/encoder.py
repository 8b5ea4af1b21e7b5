"""What a BERT classifier computes, as it learns; its weights go by the names that transformers gives them."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pliant.zoo.shapes import PairShape, Shape

EMBEDDINGS, POOLER, CLASSIFIER = "bert.embeddings.", "bert.pooler.dense", "classifier"
_DEVIATION = 0.02
_EPSILON = 1e-12
_PAD = 0


def prefix(layer: int) -> str:
    """How the names of a layer's weights begin."""
    return f"bert.encoder.layer.{layer}."


class Encoder:
    """A classifier of texts: `weights` by their names."""

    def __init__(self, layers: int, heads: int, weights: dict[str, Tensor]) -> None:
        self.layers = layers
        self.heads = heads
        self.weights = weights

    @classmethod
    def random(cls, shape: Shape | PairShape) -> "Encoder":
        """One that has learned nothing, and says nothing of what it pads with."""
        config = shape.config()
        size, inner, layers = (config[f"{each}"] for each in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        linears = {POOLER: (size, size), CLASSIFIER: (len(config["id2label"]), size)}
        norms = [f"{EMBEDDINGS}LayerNorm"]
        for layer in map(prefix, range(layers)):
            linears |= {f"{layer}attention.self.{each}": (size, size) for each in ("query", "key", "value")}
            linears |= {
                f"{layer}attention.output.dense": (size, size),
                f"{layer}intermediate.dense": (inner, size),
                f"{layer}output.dense": (size, inner),
            }
            norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
        rows = {"word": shape.vocabulary, "position": shape.positions, "token_type": 2}
        sizes = {f"{EMBEDDINGS}{name}_embeddings": (count, size) for name, count in rows.items()} | linears
        weights = {f"{name}.weight": torch.randn(given) * _DEVIATION for name, given in sizes.items()}
        weights[f"{EMBEDDINGS}word_embeddings.weight"][_PAD] = 0
        weights |= {f"{name}.bias": torch.zeros(given[0]) for name, given in linears.items()}
        weights |= {f"{name}.weight": torch.ones(size) for name in norms}
        weights |= {f"{name}.bias": torch.zeros(size) for name in norms}
        return cls(layers, config["num_attention_heads"], weights)

    @classmethod
    def load(cls, shape: Shape | PairShape, folder: Path) -> "Encoder":
        """The one that was saved to `folder`."""
        model = cls.random(shape)
        model.weights |= load_file(folder / "model.safetensors")
        return model

    def logits(self, ids: Tensor, mask: Tensor, types: Tensor | None = None, skipped: int = 0) -> Tensor:
        """What it says [rows, labels] of ids, their mask and their token types [rows, length], without its first
        `skipped` layers. Of the last layer only the first token is computed, which is all that the classifier sees."""
        words, positions, kinds = (
            self.weights[f"{EMBEDDINGS}{each}_embeddings.weight"] for each in ("word", "position", "token_type")
        )
        kind = kinds[0] if types is None else functional.embedding(types, kinds)
        x = functional.embedding(ids, words, padding_idx=_PAD) + positions[: ids.shape[1]] + kind
        x, seen = self._norm(f"{EMBEDDINGS}LayerNorm", x), mask.bool()
        for layer in map(prefix, range(skipped, self.layers - 1)):
            x = self._behind(layer, x, self._attention(f"{layer}attention.self.", x, seen))
        last = prefix(self.layers - 1)
        first = self._behind(last, x[:, 0], self._first_attention(f"{last}attention.self.", x, seen))
        return self._linear(CLASSIFIER, self._linear(POOLER, first).tanh())

    def _attention(self, name: str, x: Tensor, seen: Tensor) -> Tensor:
        query, key, value = (
            self._linear(f"{name}{each}", x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for each in ("query", "key", "value")
        )
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None, None])
        return found.transpose(1, 2).flatten(2)

    def _first_attention(self, name: str, x: Tensor, seen: Tensor) -> Tensor:
        """That of the first token alone [rows, hidden]: its queries go through the keys' weights once instead of all
        tokens, and what it found through the values'. The keys' bias adds the same to all, which is nothing."""
        key, value = (
            self.weights[f"{name}{each}.weight"].view(self.heads, -1, x.shape[2]) for each in ("key", "value")
        )
        query = self._linear(f"{name}query", x[:, 0]).view(len(x), self.heads, -1)
        asked = torch.einsum("nhw,hwd->nhd", query, key) / query.shape[-1] ** 0.5
        scores = (asked @ x.transpose(1, 2)).masked_fill(~seen[:, None], -torch.inf)
        found = torch.einsum("nhd,hwd->nhw", scores.softmax(-1) @ x, value)
        return found.flatten(1) + self.weights[f"{name}value.bias"]

    def _behind(self, name: str, x: Tensor, found: Tensor) -> Tensor:
        """What comes after the attention of a layer, which found this for x."""
        attended = self._norm(
            f"{name}attention.output.LayerNorm", x + self._linear(f"{name}attention.output.dense", found)
        )
        inner = functional.gelu(self._linear(f"{name}intermediate.dense", attended))
        return self._norm(f"{name}output.LayerNorm", attended + self._linear(f"{name}output.dense", inner))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], _EPSILON
        )
