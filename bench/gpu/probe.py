"""What the device can do: bytes and operations per second, linear layers of few rows by torch's library and by us, and
torch's own attention by shape and backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from pliant.bench.gpu import decoders
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale
from pliant.kernels.decoder.executor import kernels_for
from pliant.models.decoder_shape import DecoderShape

_BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_ATTENTIONS = {
    "ViT-B, 64 images": (64, 12, 197, 64, False),
    "BERT-base, 32 texts of 128": (32, 12, 128, 64, False),
    "prompt of 512": (1, 32, 512, 128, True),
    "prompt of 4096": (1, 32, 4096, 128, True),
}
"""Batch, heads, tokens, dimensions of a head, and whether it is causal."""
_FEW_ROWS = (1, 4, 16)
_CACHED_BYTES = 2**28
"""More than a GPU's cache holds."""


def run(record: Record, scale: Scale) -> None:
    """Each part by itself."""
    with record.part("bandwidth"):
        record.figures["bytes_per_s"] = bandwidth(scale)
    with record.part("matmul"):
        sizes = (64,) if scale.dry else (1024, 4096, 8192)
        rates = {size: _matmul(scale, size, size, size) for size in sizes}
        record.figures["flops"] = max(rates.values())
        rows = (1, 2) if scale.dry else (1, 2, 4, 8, 16, 32, 64, 128)
        width = 64 if scale.dry else 8192
        skinny = {count: 2 * width * width * count / _matmul(scale, count, width, width) for count in rows}
        record.tables["matmul"] = {
            "flops_by_size": rates,
            "seconds_of_skinny_rows": skinny,
            "bytes_of_skinny_weights": width * width * scale.dtype.itemsize,
        }
    with record.part("linear layers"):
        _linear_layers(record, scale)
    for name, shape in _ATTENTIONS.items():
        with record.part(f"attention: {name}"):
            record.tables.setdefault("attention_s", {})[name] = _attention(scale, *shape)


def bandwidth(scale: Scale) -> float:
    """Bytes that memory moves in a second: the most of a copy's, read and written, and of a maximum's, read."""
    size = 2**20 if scale.dry else 2**32
    source = torch.randn(size // 4, device=scale.device)
    target = torch.empty_like(source)
    copied = 2 * size / scale.seconds(lambda: target.copy_(source))
    return max(copied, size / scale.seconds(source.amax))


def _matmul(scale: Scale, rows: int, inner: int, columns: int) -> float:
    """Operations per second of a product of random matrices: zeros take less power, and so less time."""
    left = torch.randn(rows, inner, device=scale.device, dtype=scale.dtype)
    right = torch.randn(columns, inner, device=scale.device, dtype=scale.dtype)
    return 2 * rows * inner * columns / scale.seconds(lambda: torch.mm(left, right.t()))


@torch.inference_mode()
def _linear_layers(record: Record, scale: Scale) -> None:
    """Of the 8B model on few rows. Each is multiplied by so many weights in turn that no cache holds them."""
    kernels, _ = kernels_for(scale.device, threads=1)
    table: list[dict[str, Any]] = []
    record.tables["linear_layers"] = table
    shape = decoders.shape("8B", scale.dry)
    for name, (outs, ins) in _sizes(shape).items():
        values = outs * ins
        copies = 1 if scale.dry else -(-_CACHED_BYTES // values)
        weights = [torch.randn(outs, ins, device=scale.device, dtype=scale.dtype) for _ in range(copies)]
        layers: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
            "library": [partial(linear, weight=weight) for weight in weights],
            "ours": [kernels.linear(weight, None) for weight in weights],
            "ours_int8": [kernels.int8_linear(weight, None) for weight in weights],
        }
        for rows in _FEW_ROWS:
            x = torch.randn(rows, ins, device=scale.device, dtype=scale.dtype)
            for by, equal in layers.items():
                took = scale.seconds(_recorded(scale, partial(_each, equal, x))) / copies
                moved = values * (1 if by == "ours_int8" else scale.dtype.itemsize)
                found = {"layer": name, "rows": rows, "by": by, "seconds": took, "bytes_per_s": moved / took}
                table.append(found)
    for rows in _FEW_ROWS:
        step_s = dict.fromkeys(layers, 0.0)
        for one in table:
            if one["rows"] == rows:
                step_s[one["by"]] += one["seconds"] * (1 if one["layer"] == "head" else shape.layers)
        for by in ("ours", "ours_int8"):
            record.figures[f"linear_layers_{by}_speedup_b{rows}"] = step_s["library"] / step_s[by]


def _sizes(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of its linear layers."""
    hidden, queries, between = shape.hidden, shape.queries, shape.intermediate
    return {
        "qkv": (queries + 2 * shape.kv_heads * shape.head_dim, hidden),
        "output": (hidden, queries),
        "gate_up": (2 * between, hidden),
        "down": (hidden, between),
        "head": (shape.vocab, hidden),
    }


def _each(layers: list[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def _recorded(scale: Scale, work: Callable[[], None]) -> Callable[[], None]:
    """On a GPU as one graph, as a CPU takes longer to launch such short kernels than they run."""
    if scale.device.type == "cpu":
        return work
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _attention(scale: Scale, batch: int, heads: int, tokens: int, dim: int, causal: bool) -> dict[str, Any]:
    """Seconds by backend, or why a backend does not take the shape; the first call by itself, as it may plan."""
    if scale.dry:
        batch, heads, tokens, dim = 1, 2, 16, 16
    q, k, v = (torch.randn(batch, heads, tokens, dim, device=scale.device, dtype=scale.dtype) for _ in range(3))

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    found: dict[str, Any] = {}
    for name, backend in _BACKENDS.items():
        try:
            if backend is None:
                found[name] = {"first": scale.first_s(attend), "then": scale.seconds(attend)}
                continue
            with sdpa_kernel(backend):
                found[name] = {"first": scale.first_s(attend), "then": scale.seconds(attend)}
        except RuntimeError as reason:
            found[name] = f"does not take it: {str(reason).splitlines()[0]}"
    return found
