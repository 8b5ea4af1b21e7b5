"""Attention of packed texts in Triton against the readable one: on a GPU, or in Triton's interpreter.

Not collected with the other tests, as the interpreter changes Triton for a whole process: `test_triton_attention` runs
these in one of their own. The interpreter is wrong for bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_classifiers
from torch import Tensor

from pliant.kernels.encoder import eager_classifier, packed_graphs
from pliant.kernels.encoder.layout import Packed
from pliant.kernels.encoder.model import EncoderModel
from pliant.kernels.encoder.packed_graphs import PackedGraphs, Placed, arrays_of, texts_of
from pliant.kernels.triton_attention import attend
from pliant.models.encoder_head import POOLINGS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("firsts", [False, True])
@pytest.mark.parametrize("window", [None, 0, 5, 70])
@pytest.mark.parametrize("dim", [16, 24, 64])
def test_texts_attend_to_themselves_alone(dtype: torch.dtype, firsts: bool, window: int | None, dim: int) -> None:
    torch.manual_seed(dim)
    for lengths in [(1,), (130,), (3, 1, 64, 65, 17)]:
        qkv = torch.randn(sum(lengths), 3, 2, dim, device=DEVICE).to(dtype)
        starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        found = attend(*qkv.unbind(1), starts, max(lengths), window, firsts)
        wanted = Packed(lengths, "cpu").attend(*qkv.float().cpu().unbind(1), None, window, firsts)
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found.float().cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_count_as_often_as_they_are_said_to(dtype: torch.dtype) -> None:
    """As if they were there several times."""
    torch.manual_seed(0)
    lengths, times = (5, 70), torch.randint(1, 4, (75,))
    qkv = torch.randn(75, 3, 2, 16, device=DEVICE).to(dtype)
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    found = attend(*qkv.unbind(1), starts, max(lengths), None, False, times.float().to(DEVICE))
    q, k, v = qkv.float().cpu().unbind(1)
    wanted = []
    for text, often in zip(torch.split(torch.arange(75), lengths), torch.split(times, lengths), strict=True):
        repeated = text.repeat_interleave(often)
        layout = Packed([len(repeated)], "cpu")
        padded = torch.cat([q[text], q[text][:1].expand(len(repeated) - len(text), -1, -1)])
        wanted.append(layout.attend(padded, k[repeated], v[repeated], None, None, False)[: len(text)])
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found.float().cpu(), torch.cat(wanted), rtol=tolerance, atol=tolerance)


class PretendGraph:
    """Computes from where a graph would find its inputs, as it comes."""

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        self._forward = forward
        self.output = forward()

    def replay(self) -> None:
        self.output.copy_(self._forward())


def pretend(forward: Callable[[], Tensor], pool: Any, stream: Any) -> tuple[PretendGraph, Tensor]:
    graph = PretendGraph(forward)
    return graph, graph.output


@pytest.fixture
def graphs_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[EncoderModel], PackedGraphs]:
    """Graphs of few sizes; without a GPU they are pretended."""
    monkeypatch.setattr(packed_graphs, "SIZES", (16, 64, 130))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(packed_graphs, "record", pretend)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    return lambda model: PackedGraphs(model, DEVICE, 100)


@pytest.mark.parametrize("task", ["classify", "tokens"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_recorded_passes_answer_any_mix_of_texts(
    kind: str, task: str, tmp_path: Path, graphs_of: Callable[[EncoderModel], PackedGraphs]
) -> None:
    folder = tiny_classifiers.save(tmp_path, kind, task)
    model = eager_classifier.load_model(folder, DEVICE.type, torch.float32)
    assert isinstance(model, EncoderModel)
    assert packed_graphs.records(model)
    graphs, readable = graphs_of(model), eager_classifier.load_model(folder, "cpu", torch.float32)
    assert isinstance(readable, EncoderModel)
    rng = np.random.default_rng(0)
    for lengths in [(1,), (16,), (9, 8), (60, 3), (1,) * 9, (65, 64, 1), (3, 3), (1,)]:
        ids = rng.integers(2, tiny_classifiers.VOCABULARY, sum(lengths))
        types = rng.integers(0, 2, sum(lengths)) if model.token_types > 1 else None
        found = graphs.run(ids, types, lengths)
        assert found is not None
        given = None if types is None else torch.from_numpy(types)
        with torch.inference_mode():
            wanted = readable(torch.from_numpy(ids), given, Packed(lengths, "cpu"))
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4)
    for lengths in [(131,), (1,) * (texts_of(130) + 1)]:
        assert graphs.run(np.ones(sum(lengths), np.int64), None, lengths) is None


@pytest.mark.parametrize("how", POOLINGS)
def test_texts_are_pooled_where_they_lie(how: str) -> None:
    torch.manual_seed(0)
    lengths = (3, 1, 20)
    arrays = arrays_of(64, np.zeros(24, np.int64), None, lengths)
    positions, bounds, blocks = (torch.from_numpy(array).to(DEVICE) for array in arrays[2:])
    states = torch.randn(64, 8, device=DEVICE)
    found = Placed(positions, bounds, blocks, 64).pool(states, how)
    assert len(found) == texts_of(64)
    torch.testing.assert_close(found[:3].cpu(), Packed(lengths, "cpu").pool(states[:24].cpu(), how))
