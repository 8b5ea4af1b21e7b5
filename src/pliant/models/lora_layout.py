"""Where the matrices of a LoRA adapter lie in its blob: one run of numbers, loaded, moved and dropped as a whole.

An adapter adds B A x to what a linear layer makes of x. The blob has one block for each layer, all alike, and a block
has a part for each place where the decoder has a fused linear layer (`SITES`): the A of its modules one below the
other, [sum of ranks, in], so that one product serves them all, and then each B transposed, [rank, out], so that what is
read in order is what is added in order. Nothing is padded to the ranks of other adapters (Chameleon §4.1 keeps adapters
of many sizes side by side).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.models.decoder_shape import DecoderShape

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers that can be adapted, in the order of every tuple of ranks."""
SITES = {"qkv": (0, 1, 2), "output": (3,), "gate_up": (4, 5), "down": (6,)}
"""By fused linear layer: its modules, in the order of its outputs."""
ALIGNED_VALUES = 32
"""Every matrix begins at a multiple of so many values, 64 bytes or more."""


@dataclass(frozen=True)
class ModuleLayout:
    """One module of a site: `rank` numbers lie between x and its outputs, `first` to `first + out` of the site's."""

    rank: int
    out: int
    first: int
    b: int
    """Where B transposed, [rank, out], begins: in values from the start of the layer's block."""


@dataclass(frozen=True)
class SiteLayout:
    """One fused linear layer: how all its modules' A, [rank, in], lie at `a` (in values from the block's start)."""

    inputs: int
    rank: int
    """Of all modules together; 0 if the adapter leaves them all as they are."""
    a: int
    modules: tuple[ModuleLayout, ...]


class LoraLayout:
    """The blob of adapters of `ranks` (by `MODULES`; 0 for a module that is not adapted) for decoders of `shape`.

    `values` counts its numbers and `block` those of one layer, both multiples of `ALIGNED_VALUES`. Raises ValueError
    if there is not one rank of 0 or more for each module.
    """

    def __init__(self, shape: DecoderShape, ranks: Sequence[int]) -> None:
        if len(ranks) != len(MODULES) or min(ranks) < 0:
            raise ValueError(f"an adapter has a rank of 0 or more for each of {', '.join(MODULES)}; got {list(ranks)}")
        self.ranks = tuple(ranks)
        self.sites: dict[str, SiteLayout] = {}
        """By name, as `SITES`."""
        self.block = 0
        for name, indices in SITES.items():
            inputs = module_size(shape, indices[0])[0]
            rank, a = sum(ranks[index] for index in indices), self.block
            self.block += _aligned(rank * inputs)
            modules, first = [], 0
            for index in indices:
                out = module_size(shape, index)[1]
                modules.append(ModuleLayout(ranks[index], out, first, self.block))
                self.block += _aligned(ranks[index] * out)
                first += out
            self.sites[name] = SiteLayout(inputs, rank, a, tuple(modules))
        self.values = shape.layers * self.block


def module_size(shape: DecoderShape, module: int) -> tuple[int, int]:
    """(inputs, outputs) of a module, by its index in `MODULES`."""
    kv = shape.kv_heads * shape.head_dim
    hidden, wide = shape.hidden, shape.intermediate
    outs = (shape.queries, kv, kv, hidden, wide, wide, hidden)
    ins = (hidden, hidden, hidden, shape.queries, hidden, hidden, wide)
    return ins[module], outs[module]


def _aligned(values: int) -> int:
    return values + -values % ALIGNED_VALUES
