"""A forward pass of fixed shape, recorded once and launched as one CUDA graph, for static runtimes (Arlo §3.1)."""

from collections.abc import Callable

import torch

Forward = Callable[[torch.Tensor], torch.Tensor]

WARM_UPS = 3
"""Runs before a recording, which choose and compile kernels."""
_APART = 8


class CudaGraph:
    """`forward` on a GPU, replayed over static buffers: one launch instead of hundreds.

    `example` gives the shape and dtype of every later input; its values must be valid input. `forward` must launch the
    same work for every input, on the current stream, and never wait for the GPU. Other threads may use the GPU on other
    streams while the graph is recorded.
    """

    def __init__(self, forward: Forward, example: torch.Tensor) -> None:
        self._forward = forward  # owns the weights that the graph reads
        self._input = example.to("cuda")
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                forward(self._input)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._output = forward(self._input)

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        """The output for `host`, a CPU tensor (pinned if its copy is not to be waited for), as a new CPU tensor."""
        self._input.copy_(host, non_blocking=True)
        self._graph.replay()
        return self._output.cpu()


def graph_rows(most_rows: int) -> list[int]:
    """For how many rows graphs are recorded, where a batch runs in the smallest that holds it: 1, 2, 4, multiples of 8,
    and `most_rows`, rising.
    """
    return [rows for rows in (1, 2, 4, *range(_APART, most_rows, _APART)) if rows < most_rows] + [most_rows]
