"""A Llama-family decoder over pages of keys and values: chunks of prompts and tokens of answers in one pass.

One fused pass per iteration serves every live request, however their lengths differ (Flover §V): linear layers see one
batch of tokens, and only attention looks at rows one by one. Tokens that use a LoRA adapter get what it adds after each
linear layer (Chameleon §4.1). Where several ranks compute a model together, each has a part of every layer's heads and
of its MLP, and what they give is added up, twice a layer (Megatron-LM §3). The code below is the whole model; what its
operations do on a device is the kernels' business (see `kernels`).
"""

from collections.abc import Callable

from torch import Tensor

from pliant.kernels.decoder.kernels import AddLora, DecoderKernels, Linear, Norms
from pliant.kernels.decoder.kv_pages import KVPages
from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.prompt_scores import Scoring
from pliant.kernels.decoder.ragged import Ragged
from pliant.kernels.decoder.ranks import Ranks
from pliant.kernels.decoder.rope import rotation
from pliant.kernels.decoder.weights import DecoderWeights, LayerWeights


class _Layer:
    def __init__(
        self, weights: LayerWeights, linear: Callable[[Tensor, Tensor | None], Linear], kernels: DecoderKernels
    ) -> None:
        self.input_norm: Tensor = weights.input_norm
        self.qkv = linear(weights.qkv, weights.qkv_bias)
        self.qk_norms: Norms | None = weights.qk_norms
        self.output = linear(weights.output, weights.output_bias)
        self.mlp_norm: Tensor = weights.mlp_norm
        self.gate_up = linear(weights.gate_up, weights.gate_up_bias)
        self.gated = kernels.gated(self.gate_up)
        self.down = linear(weights.down, weights.down_bias)


class Decoder:
    """A decoder with its keys and values in `kv`, whose kernels it shares. Logits are in the weights' dtype.

    The logits returned may be a buffer that the next call reuses. Of a model that `ranks` compute together, all run
    the same passes, and the logits are there on rank 0 alone. `whole` is the model's shape, `shape` what this rank has
    of it.
    """

    def __init__(
        self, weights: DecoderWeights, kernels: DecoderKernels, kv: KVPages, ranks: Ranks | None = None
    ) -> None:
        self.whole = weights.whole
        self.shape = weights.shape
        self.weight_bytes = self.shape.weight_bytes(weights.dtype.itemsize, weights.quantize)
        self._ranks = ranks
        self.device = weights.device
        self.kv = kv
        self.kernels = kernels
        self._embedding = weights.embedding()
        kinds = {None: kernels.linear, "int8": kernels.int8_linear, "fp8": kernels.fp8_linear}
        linear = kinds[weights.quantize]
        self._layers = [_Layer(weights.layer(index), linear, kernels) for index in range(self.shape.layers)]
        self._norm = weights.norm()
        self._head = linear(self._embedding[weights.vocabulary] if self.shape.tied else weights.head(), None)
        self._rotation = rotation(self.shape.rope, self.shape.head_dim, kv.max_length, self.device)

    def run(
        self,
        tokens: Tensor,
        batch: Ragged,
        ends: Tensor | None = None,
        lora: LoraBatch | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        """Store the keys and values of `tokens`; the logits that follow those at `ends`, or all, [number, vocab].

        `tokens` are those of `batch`, in its order, and so are the rows of `lora`. They must be ids of the vocabulary,
        and positions less than max_length, which is not checked here, as all may lie on a GPU. `scoring` reads the
        logits that it asks for, on rank 0.
        """
        return self.step(tokens, batch, ends, None if lora is None else self.kernels.lora(lora), scoring)

    def step(
        self,
        tokens: Tensor,
        batch: Ragged,
        ends: Tensor | None = None,
        add_lora: AddLora | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        """As `run`, with what adds adapters."""
        kernels, eps = self.kernels, self.shape.norm_eps
        hidden = self._embedding[tokens]
        delta: Tensor | None = None
        for index, (layer, window) in enumerate(zip(self._layers, self.shape.windows, strict=True)):
            keys, values = self.kv.layer(index)
            normed = kernels.add_norm(hidden, delta, layer.input_norm, eps)
            qkv = layer.qkv(normed)
            if add_lora is not None:
                add_lora(qkv, normed, index, "qkv")
            q = kernels.rotate_and_store(
                qkv, batch.positions, batch.pages, self._rotation, layer.qk_norms, eps, keys, values
            )
            mixed = kernels.attention(q, keys, values, batch, window)
            delta = layer.output(mixed)
            if add_lora is not None:
                add_lora(delta, mixed, index, "output")
            if self._ranks is not None:
                self._ranks.add_up(delta)
            normed = kernels.add_norm(hidden, delta, layer.mlp_norm, eps)
            if add_lora is None:
                gated = layer.gated(normed)
            else:
                gate_up = layer.gate_up(normed)
                add_lora(gate_up, normed, index, "gate_up")
                gated = kernels.gate(gate_up)
            delta = layer.down(gated)
            if add_lora is not None:
                add_lora(delta, gated, index, "down")
            if self._ranks is not None:
                self._ranks.add_up(delta)
        assert delta is not None
        if scoring is not None:
            for rows, targets in scoring.blocks():
                logits = self._logits(hidden[rows], delta[rows])
                if self._ranks is None or self._ranks.rank == 0:
                    scoring.read(logits, targets)
        if ends is not None:
            if not len(ends):
                return hidden.new_empty((0, self.shape.vocab))
            hidden, delta = hidden[ends], delta[ends]
        return self._logits(hidden, delta)

    def _logits(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Of these rows, to which what the last layer gave is added."""
        logits = self._head(self.kernels.add_norm(hidden, delta, self._norm, self.shape.norm_eps))
        return logits if self._ranks is None else self._ranks.side_by_side(logits, self.shape.vocab)
