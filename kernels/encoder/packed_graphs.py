"""Passes of packed texts on a GPU, recorded as CUDA graphs, one for each of a few numbers of tokens.

A pass launches a hundred small kernels, which takes a CPU ten times longer than a GPU needs for a short text. A batch
runs in the smallest graph that holds its tokens and texts. How these lie is read on the GPU from what was uploaded with
them, in one copy, so that a graph serves every mix of lengths. Tokens beyond the batch belong to no text, and no text
reads them; what is computed for them means nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.encoder.layout import Bias
from pliant.kernels.encoder.model import EncoderModel
from pliant.kernels.triton_attention import attend, blocks_of, most_blocks
from pliant.kernels.upload import packed, refill, unpacked, upload

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Tokens of a graph."""
_SHORT = 8
"""Tokens that a text has on average, at least, in a batch that fills a graph."""
Arrays = list[NDArray[np.int32]]


def records(model: EncoderModel) -> bool:
    """Whether its passes can be recorded: what relative positions add depends on the lengths."""
    return model.encoder.distances is None and model.encoder.shape.disentangled is None


def texts_of(tokens: int) -> int:
    """Texts of a graph of so many tokens, at most."""
    return max(1, tokens // _SHORT)


def arrays_of(tokens: int, ids: NDArray[np.int64], types: NDArray[np.int64] | None, lengths: Sequence[int]) -> Arrays:
    """What a graph of so many tokens reads of texts of these lengths: ids, types and positions [tokens], bounds
    [texts + 1], and attention's blocks [most_blocks, 2]."""
    flat, kinds, positions = (np.zeros(tokens, np.int32) for _ in range(3))
    flat[: len(ids)] = ids
    if types is not None:
        kinds[: len(ids)] = types
    if lengths:
        positions[: len(ids)] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    texts = texts_of(tokens)
    bounds = np.full(texts + 1, len(ids), np.int32)
    bounds[: len(lengths)] = np.cumsum([0, *lengths], dtype=np.int32)[:-1]
    blocks = blocks_of(lengths, most_blocks(tokens, texts))
    return [flat, kinds, positions, bounds, blocks]


class Placed:
    """A `Layout` that is known on the GPU alone: `positions` and `bounds` are those of `arrays_of`."""

    def __init__(self, positions: Tensor, bounds: Tensor, blocks: Tensor, longest: int) -> None:
        self.longest = longest
        self.positions = positions.long()
        self._bounds = bounds.long()
        self._blocks = blocks
        self._within = len(positions) - 1
        self._lengths = self._bounds[1:] - self._bounds[:-1]

    def counted(self, chosen: Tensor) -> Tensor:
        """As `Layout.counted`."""
        counts = chosen.long().cumsum(0)
        first = torch.arange(len(chosen), device=chosen.device) - self.positions
        return counts - counts[first] + chosen[first].long()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, window: int | None, firsts: bool) -> Tensor:
        """As `Layout.attend`, without a bias."""
        assert bias is None
        blocks = None if firsts else self._blocks
        return attend(q, k, v, self._bounds, self.longest, window, firsts, blocks=blocks)

    def firsts(self, x: Tensor) -> Tensor:
        """As `Layout.firsts`."""
        return x[self._bounds[:-1].clamp(max=self._within)]

    def pool(self, states: Tensor, how: str) -> Tensor:
        """As `Layout.pool`."""
        if how == "cls":
            return self.firsts(states).float()
        if how == "lasttoken":
            return states[(self._bounds[1:] - 1).clamp(min=0)].float()
        states = states.float()
        if how == "max":
            return self._reduced(states, "max")
        weights = torch.ones_like(states[:, :1]) if how != "weightedmean" else self.positions[:, None] + 1.0
        total, count = self._reduced(states * weights, "sum"), self._reduced(weights, "sum")
        return total / (count.sqrt() if how == "mean_sqrt_len_tokens" else count)

    def _reduced(self, x: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(x, how, lengths=self._lengths, unsafe=True)


class PackedGraphs:
    """Recorded passes of `model` on `device` for texts of up to `max_length` tokens.

    Making one takes about a second; other threads may use the GPU on other streams meanwhile.
    """

    @torch.inference_mode()
    def __init__(self, model: EncoderModel, device: torch.device, max_length: int) -> None:
        self._model = model
        self._longest = max_length
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._recorded: list[tuple[int, Tensor, Any, Tensor]] = []
        for tokens in reversed(SIZES):  # largest first, so that the others find room in its memory
            arrays = arrays_of(tokens, np.zeros(0, np.int64), None, ())
            given = upload(packed(arrays), device)
            graph, output = record(self._pass(unpacked(given, arrays)), pool, stream)
            self._recorded.insert(0, (tokens, given, graph, output))

    @torch.inference_mode()
    def run(
        self, ids: NDArray[np.int64], types: NDArray[np.int64] | None, lengths: Sequence[int]
    ) -> NDArray[np.float32] | None:
        """What the model says of packed texts (see `EncoderModel.forward`); None if no graph holds so many."""
        for tokens, given, graph, output in self._recorded:
            if tokens >= len(ids) and texts_of(tokens) >= len(lengths):
                refill(given, packed(arrays_of(tokens, ids, types, lengths)))
                graph.replay()
                found: NDArray[np.float32] = output[: len(ids if self._model.labels_tokens else lengths)].cpu().numpy()
                return found
        return None

    def _pass(self, arrays: list[Tensor]) -> Callable[[], Tensor]:
        ids, types, positions, bounds, blocks = arrays
        longest = min(len(ids), self._longest)

        def forward() -> Tensor:
            kinds = types.long() if self._model.token_types > 1 else None
            found: Tensor = self._model(ids.long(), kinds, Placed(positions, bounds, blocks, longest))
            return found

        return forward


def record(forward: Callable[[], Tensor], pool: Any, stream: torch.cuda.Stream) -> tuple[Any, Tensor]:
    """A graph of `forward` and where it leaves its result."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()  # compiles kernels, which cannot be done while recording
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = forward()
    return graph, output
