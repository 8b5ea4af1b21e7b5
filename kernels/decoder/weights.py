"""The weights of a decoder, read layer by layer from safetensors and fused on the way.

Queries, keys and values become one matrix, gate and up another, so that a layer takes four products instead of seven.
Only one layer is held at a time: whoever prepares weights for a device drops what was read before the next layer.

Of a model that several ranks compute together each reads its share: of heads, of the MLP's width, of the vocabulary's
rows of the head (Shoeybi et al., "Megatron-LM", 2019, §3).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pliant.errors import ModelError
from pliant.kernels.decoder.fp8 import E4M3
from pliant.kernels.saved_tensors import SavedTensors, Size
from pliant.models.decoder_info import read_json, shape_of
from pliant.models.decoder_shape import DecoderShape, Quantize


@dataclass(frozen=True)
class LayerWeights:
    """One layer; matrices are [out, in], biases and q/k norms None where the model has none."""

    input_norm: Tensor
    qkv: Tensor
    """[(heads + 2 kv_heads) head_dim, hidden]: queries, then keys, then values."""
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    """For queries and keys, [head_dim] each."""
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 intermediate, hidden]: gate, then up."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def share_of(width: int, rank: int, ranks: int) -> slice:
    """Which of `width` rows or columns are `rank`'s: as many for each of the ranks, up to one."""
    return slice(width * rank // ranks, width * (rank + 1) // ranks)


def part(whole: Tensor, size: Size, rank: int, ranks: int) -> Tensor:
    """The share of `rank`, of this size, in a whole tensor: split where it is smaller."""
    return whole[
        tuple(share_of(n, rank, ranks) if n != m else slice(n) for n, m in zip(whole.shape, size, strict=True))
    ]


def tensor_sizes(shape: DecoderShape) -> dict[str, Size]:
    """By transformers' names: the size of every tensor that such a decoder has."""
    hidden, intermediate, kv = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
    layer: dict[str, Size] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (shape.queries, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, shape.queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if shape.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    biased = [f"self_attn.{name}_proj" for name in "qkv" * shape.qkv_bias + "o" * shape.output_bias]
    biased += [f"mlp.{name}_proj" for name in ("gate", "up", "down") if shape.mlp_bias]
    layer |= {f"{name}.bias": layer[f"{name}.weight"][:1] for name in biased}
    sizes: dict[str, Size] = {"model.embed_tokens.weight": (shape.vocab, hidden), "model.norm.weight": (hidden,)}
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, hidden)
    for index in range(shape.layers):
        sizes |= {f"model.layers.{index}.{name}": size for name, size in layer.items()}
    return sizes


class DecoderWeights(ABC):
    """Weights by transformers' names; a subclass says where a tensor comes from.

    `dtype` and `device` are what they are handed out in, whatever they are stored in. `whole` is the model's shape, and
    `shape` that of the share of `rank`, one of `ranks`. `quantize` says as what linear layers keep them. Raises
    ValueError if the model cannot be shared like that.
    """

    def __init__(
        self,
        shape: DecoderShape,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
        quantize: Quantize | None = None,
    ) -> None:
        self.whole = shape
        self.shape = shape.of_rank(ranks)
        self.rank = rank
        self.ranks = ranks
        self.vocabulary = share_of(shape.vocab, rank, ranks)
        """The tokens whose logits this rank computes."""
        self.sizes = tensor_sizes(self.shape)
        if not shape.tied:
            self.sizes["lm_head.weight"] = (self.vocabulary.stop - self.vocabulary.start, shape.hidden)
        self.dtype = dtype
        self.device = device
        self.quantize = quantize

    @property
    def nbytes(self) -> int:
        """What they take once linear layers have prepared theirs; a tied head that these pack is a copy of its own."""
        shape, wide = self.shape, self.dtype.itemsize
        copied = shape.tied and (self.quantize or self.device.type == "cpu")
        head = shape.vocab * shape.hidden // self.ranks if copied else 0
        return shape.weight_bytes(wide, self.quantize) + head * (1 if self.quantize else wide)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are stored in."""
        return E4M3 if self.quantize == "fp8" else self.dtype

    @abstractmethod
    def copy(self, name: str, into: Tensor) -> None:
        """Fill `into` with the tensor of that name, which has its size."""

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        return self._read("model.embed_tokens.weight")

    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""
        return self._read("model.norm.weight")

    def head(self) -> Tensor:
        """The rows of `vocabulary`, [tokens, hidden], of a model that is not tied."""
        return self._read("lm_head.weight")

    def layer(self, index: int) -> LayerWeights:
        """Layer `index`, fused. Biases of sums over ranks are the first rank's."""
        shape, at = self.shape, f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        qkv = [attention + f"{name}_proj" for name in "qkv"]
        gate_up = [mlp + "gate_proj", mlp + "up_proj"]
        q_norm, k_norm = (attention + f"{name}_norm.weight" for name in "qk")
        return LayerWeights(
            input_norm=self._read(at + "input_layernorm.weight"),
            qkv=self._fused(qkv, "weight"),
            qkv_bias=self._fused(qkv, "bias") if shape.qkv_bias else None,
            qk_norms=(self._read(q_norm), self._read(k_norm)) if shape.qk_norm else None,
            output=self._read(attention + "o_proj.weight"),
            output_bias=self._read(attention + "o_proj.bias") if shape.output_bias and not self.rank else None,
            mlp_norm=self._read(at + "post_attention_layernorm.weight"),
            gate_up=self._fused(gate_up, "weight"),
            gate_up_bias=self._fused(gate_up, "bias") if shape.mlp_bias else None,
            down=self._read(mlp + "down_proj.weight"),
            down_bias=self._read(mlp + "down_proj.bias") if shape.mlp_bias and not self.rank else None,
        )

    def _read(self, name: str) -> Tensor:
        tensor = torch.empty(self.sizes[name], dtype=self.dtype, device=self.device)
        self.copy(name, tensor)
        return tensor

    def _fused(self, modules: Sequence[str], kind: str) -> Tensor:
        """The tensors of several modules, one below the other."""
        names = [f"{module}.{kind}" for module in modules]
        rows = [self.sizes[name][0] for name in names]
        fused = torch.empty((sum(rows), *self.sizes[names[0]][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, fused.split_with_sizes(rows), strict=True):
            self.copy(name, part)
        return fused


class SavedWeights(DecoderWeights):
    """The weights in a folder that transformers' `save_pretrained` wrote: config.json, and safetensors in one file or
    several. Files are mapped, not read, so that no second copy of the weights is ever held.

    Raises ModelError if the folder holds no decoder that is supported, lacks a tensor, or has one of another size, and
    ValueError if the ranks cannot share it.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
        quantize: Quantize | None = None,
    ) -> None:
        super().__init__(read_shape(folder), dtype, device, rank, ranks, quantize)
        self._tensors = SavedTensors(folder)
        sizes = tensor_sizes(self.whole)
        if problems := [found for name, size in sizes.items() if (found := self._tensors.problem(name, size))]:
            more = f" (and {len(problems) - 3} more)" * (len(problems) > 3)
            told = "; ".join(problems[:3]) + more
            raise ModelError(f"{folder}: the weights do not fit the config.json: {told}; save the model again")

    def copy(self, name: str, into: Tensor) -> None:
        into.copy_(part(self._tensors[name], tuple(into.shape), self.rank, self.ranks))


class RandomWeights(DecoderWeights):
    """Untrained weights, for measurements: norms are 1 and all else is small, so that activations stay finite."""

    def copy(self, name: str, into: Tensor) -> None:
        if name.endswith("norm.weight"):
            into.fill_(1)
        else:
            into.normal_(std=0.02)


def read_shape(folder: Path) -> DecoderShape:
    """The decoder that a folder's config.json describes. Raises ModelError if there is none that is supported."""
    if not (config := folder / "config.json").is_file():
        raise ModelError(f"{folder}: has no config.json; choose a folder that transformers saved a model in")
    return shape_of(read_json(config), str(folder))
