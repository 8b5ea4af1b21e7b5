"""Recorded forward passes take any number of rows; what a GPU would record is run as it comes here."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from support.vision_folders import vision_folder
from torch import Tensor

from pliant.kernels.vision import cuda as vit_cuda
from pliant.kernels.vision import executor as vit_executor
from pliant.kernels.vision.cuda import CudaVisionExecutor, RecordedForwards
from pliant.kernels.vision.tasks import TaskWeights
from pliant.models.vision_head import Head


class Eager:
    """Stands in for a graph: computes from the recorded inputs when replayed."""

    def __init__(self, inputs: list[Tensor], output: Tensor) -> None:
        self.inputs, self.output = inputs, output

    def replay(self) -> None:
        self.output.copy_(features(*self.inputs))


def features(images: Tensor, prompts: Tensor | None = None) -> Tensor:
    """By row: the sum of its image and prompts, and the number of rows that are computed."""
    sums = images.float().sum((1, 2, 3)) + (0 if prompts is None else prompts.sum((1, 2, 3)))
    return torch.stack([sums, torch.full_like(sums, len(images))], 1)


def record(features: object, inputs: list[Tensor], pool: object, stream: object) -> tuple[Eager, Tensor]:
    output = torch.zeros(len(inputs[0]), 2)
    return Eager(inputs, output), output


def test_a_batch_runs_in_the_smallest_graph_that_holds_it(monkeypatch) -> None:
    monkeypatch.setattr(vit_cuda, "_record", record)
    shared = torch.zeros(14, 2, 2, 1, dtype=torch.uint8)
    plain = RecordedForwards(features, [shared], None, None)
    prompted = RecordedForwards(features, [shared, torch.zeros(14, 1, 2, 3)], None, None)
    for rows, computed in [(14, 14), (9, 14), (8, 8), (5, 8), (4, 4), (3, 4), (2, 2), (1, 1)]:
        images = torch.randint(256, (rows, 2, 2, 1), dtype=torch.uint8)
        prompts = torch.randn(rows, 1, 2, 3)
        for found, expected in [
            (plain(images), features(images)),
            (prompted(images, prompts), features(images, prompts)),
        ]:
            torch.testing.assert_close(found[:, 0], expected[:, 0])
            assert found[:, 1].tolist() == [computed] * rows
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        prompted(images)


def test_what_graphs_read_lives_as_long_as_they_do(monkeypatch, tmp_path: Path) -> None:
    pools, streams, read = set(), set(), []

    def recorded(features: torch.nn.Module, inputs: list[Tensor], pool: object, stream: object) -> tuple[Eager, Tensor]:
        pools.add(pool)
        streams.add(stream)
        read.extend(weakref.ref(buffer) for buffer in features.buffers())
        return record(features, inputs, pool, stream)

    monkeypatch.setattr(vit_cuda, "_record", recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    vision_folder(tmp_path)
    plain = vit_executor.load(tmp_path, most_rows=6)
    executor = CudaVisionExecutor(plain.info, plain._vit, 6)
    executor.prepare([-3, 0, 2])
    gc.collect()
    assert len(read) == 3 * 4 * 2, "3 gammas, recorded for 1, 2, 4 and 6 rows, with a mean and a deviation each"
    assert all(buffer() is not None for buffer in read)
    assert (len(pools), len(streams)) == (1, 1), "memory that is shared is used in one order"
    assert [executor.computed_rows(rows) for rows in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert executor.memory_bytes(0, 3) == executor.memory_bytes(0, 4) == plain.memory_bytes(0, 4)


def test_a_batch_is_copied_once_on_its_way_and_once_back(monkeypatch, tmp_path: Path) -> None:
    given: list[Tensor] = []

    class Forwards:
        def __init__(self, features: object, inputs: list[Tensor], pool: object, stream: object) -> None: ...

        def __call__(self, images: Tensor) -> Tensor:
            given.append(images)
            return features_of(images)

    def features_of(images: Tensor) -> Tensor:
        return images.float().flatten(1)[:, : plain.info.hidden]

    copies, cpu = [], Tensor.cpu
    monkeypatch.setattr(vit_cuda, "RecordedForwards", Forwards)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: copies.append(tensor) or cpu(tensor))
    vision_folder(tmp_path)
    plain = vit_executor.load(tmp_path, most_rows=4)
    executor = CudaVisionExecutor(plain.info, plain._vit, 4)
    executor.prepare([0])
    for key, labels in (("a", 2), ("b", 3)):
        head = torch.randn(labels, plain.info.hidden)
        executor.add_task(key, TaskWeights({0: Head(head, torch.zeros(labels))}, {}))
    room = executor.room(3)
    room[:] = torch.randint(256, room.shape, dtype=torch.uint8).numpy()
    answers = executor.run(room, ["b", "a", "b"], 0)
    assert [len(row) for row in answers] == [3, 2, 3]
    assert given[0].data_ptr() == room.ctypes.data
    assert len(copies) == 1
    for others in (executor.run(room.copy(), ["b", "a", "b"], 0), executor.run(room[:1], ["b"], 0)):
        for row, again in zip(answers, others, strict=False):
            assert row == pytest.approx(again, rel=1e-4)


@pytest.mark.parametrize("gamma", [0, 2])
def test_what_is_not_prepared_gets_its_images_on_the_device(monkeypatch, tmp_path: Path, gamma: int) -> None:
    """The device is one that has no numbers, but minds, as a GPU does, what lies elsewhere."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    vision_folder(tmp_path)
    plain = vit_executor.load(tmp_path, most_rows=4)
    executor = CudaVisionExecutor(plain.info, plain._vit.to("meta"), 4)
    prompts = [torch.zeros(3, plain.info.layers, gamma, plain.info.hidden, device="meta")] * (gamma > 0)
    found = executor._forward(gamma)(executor._input(executor.room(3)), *prompts)
    assert (found.device.type, list(found.shape)) == ("meta", [3, plain.info.hidden])
