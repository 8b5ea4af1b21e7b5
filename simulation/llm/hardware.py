"""What things cost on the paper's machines: every number of the simulation that is not a policy's stands here.

Constants are public figures of the hardware, or follow from the paper's measurements of an unloaded system. None was
chosen by what the comparison then said. The paper gives no number for some; how those were chosen stands beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_GIB = 2**30
_HALF = 2
"""Bytes of a float16."""

MEMORY_SHARE = 0.9
"""Of the GPU's memory that weights, keys, values and adapters share; the usual default of serving systems."""
BANDWIDTH_SHARE = 0.65
"""Of the memory's bandwidth that a decode step reaches. The paper's SLO for the time between tokens is 150 ms, five
times the unloaded 30 ms (§5.2), in which an A40 reads the weights of Llama-7B once."""
FLOPS_SHARE = 0.5
"""Of the tensor cores' peak that a prefill reaches. The paper has no number: half is what such prefills commonly do."""
ADAPTER_FLOP = 53.4
"""What a floating-point operation of an adapter costs in a prefill, in operations of the base model. Of the time to
first token with rank 128, computing the base takes 40%, loading 17.5% and the adapter the rest (Figure 2)."""


@dataclass(frozen=True)
class Link:
    """From host to GPU; it carries one adapter at a time.

    By Figure 2 an adapter of rank 128, 268 MB, takes 17.5/40 of the prefill of a medium prompt to load. That is 40 ms
    if medium means 512 tokens, as in the study the paper takes its sizes from. The fixed part is for the 128 matrices
    of a rank-8 adapter, each a copy of its own, at some 16 us; the paper has no number for it.
    """

    bytes_per_s: float = 7e9
    fixed_s: float = 0.002

    def seconds(self, bytes: int) -> float:
        """To load an adapter of so many bytes on an idle link."""
        return self.fixed_s + bytes / self.bytes_per_s


FIGURE_4_BYTES_PER_S = 0.6e9
"""The link's bandwidth by another measurement of the paper, which contradicts Figure 2: with 500 adapters of rank 32,
67 MB each, the link is what limits S-LoRA at about 5 to 9 requests per second (Figure 4)."""


@dataclass(frozen=True)
class Gpu:
    """Bytes of memory, bytes per second to and from it, and float16 operations per second of its tensor cores."""

    name: str
    memory: int
    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Model:
    """A Llama model in float16."""

    name: str
    parameters: float
    layers: int
    hidden: int

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return int(self.parameters * _HALF)

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token."""
        return 2 * self.layers * self.hidden * _HALF

    def adapter_bytes(self, rank: int) -> int:
        """Of an adapter for q, k, v and o in every layer (§5.1, as S-LoRA's)."""
        return self.layers * 4 * 2 * rank * self.hidden * _HALF


A40 = Gpu("A40", 48 * _GIB, 696e9, 149.7e12)
A100 = {gib: Gpu(f"A100 {gib} GB", gib * _GIB, 2039e9, 312e12) for gib in (24, 48, 80)}
"""By GiB of memory (§5.5)."""

LLAMA_7B = Model("Llama-7B", 6.74e9, 32, 4096)
LLAMA_13B = Model("Llama-13B", 13.02e9, 40, 5120)
LLAMA_30B = Model("Llama-30B", 32.53e9, 60, 6656)


@dataclass(frozen=True)
class Costs:
    """What a step costs with `model` on `gpu`, in seconds.

    A step computes the prompts it admits in one pass and then one token for each live request in another. Either pass
    takes as long as reading the weights or as its operations, whichever is longer.
    """

    gpu: Gpu
    model: Model
    link: Link = Link()

    @property
    def memory(self) -> int:
        """Bytes for keys, values and adapters."""
        return int(self.gpu.memory * MEMORY_SHARE) - self.model.bytes

    def prefill_s(self, prompts: Iterable[tuple[int, int]]) -> float:
        """Of prompts of so many tokens, with adapters of so many bytes; the attention within a prompt is causal."""
        base = adapters = 0.0
        tokens = 0
        for length, adapter_bytes in prompts:
            tokens += length
            base += self._linear(length) + 2 * self.model.layers * self.model.hidden * length**2
            adapters += ADAPTER_FLOP * adapter_bytes * length  # two operations for each of its parameters
        return max(self._weights_s, base / self._flops) + adapters / self._flops if tokens else 0.0

    def decode_s(self, live: int, stored: int, adapter_bytes: int) -> float:
        """One token for each of `live` requests, which have `stored` tokens together.

        `adapter_bytes` counts an adapter once for each request that uses it: kernels that gather adapters, Punica's and
        S-LoRA's, read it anew for each row.
        """
        if not live:
            return 0.0
        read_s = (stored * self.model.token_bytes + adapter_bytes) / (self.gpu.bandwidth * BANDWIDTH_SHARE)
        return max(self._weights_s, self._linear(live) / self._flops) + read_s

    def alone_s(self, prompt: int, output: int, adapter_bytes: int) -> tuple[float, float]:
        """Times to the first and to the last token of a request on an idle system whose adapter must be loaded."""
        first_s = self.link.seconds(adapter_bytes) + self.prefill_s([(prompt, adapter_bytes)])
        steps = output - 1
        stored = steps * prompt + steps * (steps - 1) // 2
        read_s = stored * self.model.token_bytes / (self.gpu.bandwidth * BANDWIDTH_SHARE)
        return first_s, first_s + steps * self.decode_s(1, 0, adapter_bytes) + read_s

    def prompts_within(self, seconds: float) -> int:
        """How many prompt tokens a prefill computes in so many seconds, without adapters."""
        return max(1, int(seconds * self._flops / self._linear(1)))

    @property
    def _weights_s(self) -> float:
        return self.model.bytes / (self.gpu.bandwidth * BANDWIDTH_SHARE)

    @property
    def _flops(self) -> float:
        return self.gpu.flops * FLOPS_SHARE

    def _linear(self, tokens: int) -> float:
        """Operations of the base model's matrices."""
        return 2 * self.model.parameters * tokens
