"""Forward passes of a vision transformer on a GPU, recorded as CUDA graphs, one for each gamma and number of rows.

A forward pass launches hundreds of small kernels, and merging adds more, which takes a CPU longer than the GPU needs
for a small batch. A batch runs in the smallest recorded one that holds it; rows beyond it hold what was there before
and mean nothing, as rows do not see each other.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels import gpu_memory
from pliant.kernels.cuda_graph import WARM_UPS, graph_rows
from pliant.kernels.vision.executor import VisionExecutor
from pliant.kernels.vision.model import ImageFeatures
from pliant.kernels.vision.packages import Forward
from pliant.models.sources import Progress


class CudaVisionExecutor(VisionExecutor):
    """A `VisionExecutor` on a GPU, on its default stream."""

    @torch.inference_mode()
    def prepare(self, gammas: Sequence[int], progress: Progress | None = None) -> None:
        """Record forward passes for all of `gammas`, which takes seconds; nothing else may use the GPU meanwhile."""
        info, pool, stream = self.info, torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        size = (self.most_rows, info.height, info.width, info.channels)
        images = torch.zeros(size, dtype=torch.uint8, device=self.device)
        for done, gamma in enumerate(gammas):
            if progress:
                progress(f"recording for {gamma} tokens a layer", done / len(gammas))
            inputs = [images]
            if gamma > 0:
                shape = (self.most_rows, info.layers, gamma, info.hidden)
                inputs.append(torch.zeros(shape, dtype=self.dtype, device=self.device))
            self._forwards[gamma] = RecordedForwards(self._features(gamma), inputs, pool, stream)
        self.backend = "cuda-graph"

    def computed_rows(self, rows: int) -> int:
        recorded = graph_rows(self.most_rows)
        return recorded[bisect_left(recorded, rows)]

    def free_bytes(self) -> float:
        return gpu_memory.free_bytes(self.device)

    def room(self, rows: int) -> NDArray[np.uint8]:
        """As in `VisionExecutor`, and always the same: from there the GPU copies at its own speed."""
        return self._pinned[:rows].numpy()

    @cached_property
    def _pinned(self) -> Tensor:
        info = self.info
        return torch.zeros(self.most_rows, info.height, info.width, info.channels, dtype=torch.uint8).pin_memory()

    def _input(self, images: NDArray[np.uint8]) -> Tensor:
        room = self.room(len(images))
        if not np.may_share_memory(images, room):
            room[:] = images
        return self._pinned[: len(images)]

    def _forward(self, gamma: int) -> Forward:
        forward = super()._forward(gamma)
        if isinstance(forward, RecordedForwards):
            return forward
        return lambda images, *prompts: forward(images.to(self.device, non_blocking=True), *prompts)


class RecordedForwards:
    """`features` for batches of 1 image to as many as `inputs` hold, each recorded when made.

    `inputs` are on the GPU: images uint8 [most_rows, …], and prompts [most_rows, …] if gamma is above 0. Calls fill
    them; other gammas may share them, as calls do not overlap. Nothing else in this process may use the GPU while this
    records. Graphs that are recorded on the same `stream` and share a `pool` share its memory.
    """

    def __init__(self, features: ImageFeatures, inputs: Sequence[Tensor], pool: Any, stream: Any) -> None:
        self._features = features  # owns the numbers beside weights that the graphs read
        self._inputs = inputs
        self._rows = graph_rows(len(inputs[0]))
        of_rows = ([tensor[:rows] for tensor in inputs] for rows in reversed(self._rows))
        recorded = [_record(features, some, pool, stream) for some in of_rows]
        self._recorded = recorded[::-1]
        """Recorded largest first, so that the others find room in its memory."""

    def __call__(self, *given: Tensor) -> Tensor:
        """Features [n, hidden] on the GPU, valid until the next call, of what `inputs` hold n rows of."""
        rows = len(given[0])
        for tensor, filling in zip(self._inputs, given, strict=True):
            tensor[:rows].copy_(filling, non_blocking=True)
        graph, output = self._recorded[bisect_left(self._rows, rows)]
        graph.replay()
        return output[:rows]


def _record(
    features: ImageFeatures, inputs: list[Tensor], pool: Any, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            features(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        output = features(*inputs)
    return graph, output
