"""The real tasks of the vision benchmark on made-up images: parts, backbone, accuracies, and the speed of merging."""

from __future__ import annotations

import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.images import encoded

from pliant.bench.vision import real_tasks, real_tasks_backbone
from pliant.bench.vision.merging_speed import Case, measure
from pliant.bench.vision.real_tasks_backbone import Backbone
from pliant.bench.vision.real_tasks_data import GROUPS, TASKS, Parts, RealTask, split
from pliant.errors import PliantError
from pliant.kernels.vision import executor as vit_executor
from pliant.training.vision import Examples

TINY = Backbone(layers=2, hidden=16, heads=1, epochs=1, batch=16)


def examples(count: int, labels: int = 10) -> Examples:
    """Images that are as bright as their label says."""
    rng = np.random.default_rng(count)
    wanted = np.arange(count) % labels
    images = rng.integers(0, 20, (count, 32, 32, 3)) + (wanted * 20)[:, None, None, None]
    return Examples(images.astype(np.uint8), wanted.astype(np.int64))


def backbone(folder: Path) -> Path:
    parts = [(examples(32 + index), task.groups) for index, task in enumerate(TASKS)]
    real_tasks_backbone.train(TINY, parts, folder)
    return folder


def packed(folder: Path, name: str, arrays: dict[str, NDArray[np.uint8]]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    folder.mkdir()
    (folder / name).write_bytes(lzma.compress(content.getvalue(), preset=0))


def test_the_parts_share_no_image_and_lose_none() -> None:
    every = Examples(np.arange(50, dtype=np.uint8).reshape(50, 1, 1, 1), np.arange(50))
    parts = split(every)
    assert [len(part.labels) for part in parts] == [30, 10, 10]
    assert sorted(np.concatenate([part.labels for part in parts]).tolist()) == list(range(50))
    for part in parts:
        assert (part.images.reshape(-1) == part.labels).all()


def test_each_label_is_in_one_group_and_each_group_has_several() -> None:
    groups = [group for task in TASKS for group in task.groups]
    assert set(groups) == set(range(len(GROUPS)))
    for task in TASKS:
        assert all(task.groups.count(group) > 1 for group in task.groups)


def test_the_sets_are_read_as_rgb_of_one_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, file, shape in (
        ("cifar10", "cifar10_train10k_test2k.npz.xz", (32, 32, 3)),
        ("fashion_mnist", "fashion_mnist_test10k_train2k.npz.xz", (28, 28)),
    ):
        images = {f"x_{part}": rng.integers(256, size=(5, *shape), dtype=np.uint8) for part in ("train", "test")}
        labels = {f"y_{part}": np.arange(5, dtype=np.uint8) for part in ("train", "test")}
        packed(tmp_path / name, file, {**images, **labels})
    (tmp_path / "eurosat").mkdir()
    with zipfile.ZipFile(tmp_path / "eurosat" / "eurosat_rgb_200_per_class_jpeg.zip", "w") as archive:
        for label in ("Forest", "River"):
            archive.writestr(f"{label}/{label}_1.jpg", encoded(Image.new("RGB", (64, 64), "green"), "JPEG"))
    read = {task.name: task.read(tmp_path) for task in TASKS}
    assert {name: found.images.shape for name, found in read.items()} == {
        "cifar10": (10, 32, 32, 3),
        "eurosat": (2, 32, 32, 3),
        "fashion_mnist": (10, 32, 32, 3),
    }
    assert read["eurosat"].labels.tolist() == [1, 8]
    assert read["fashion_mnist"].labels.tolist() == [*range(5)] * 2


def test_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(PliantError, match=r"has no cifar10 .*give --data"):
        TASKS[0].parts(tmp_path)


def test_a_backbone_and_a_task_can_be_served_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_tasks, "_MOST_STEPS", 2)
    model = backbone(tmp_path / "model")
    assert (
        model.joinpath("model.safetensors").read_bytes()
        == backbone(tmp_path / "again").joinpath("model.safetensors").read_bytes()
    )
    task = RealTask("brightness", tuple("0123456789"), TASKS[0].groups, lambda data: examples(60))
    parts = Parts(examples(40), examples(20), examples(30))
    real_tasks.train(task, parts, model, tmp_path / "brightness")
    real = real_tasks.RealTasks(model, {"brightness": tmp_path / "brightness"}, {"brightness": parts.held_out})
    executor = vit_executor.load(model, most_rows=16)
    found = real_tasks.accuracies(executor, real, (-5, 0, 2, 4, 8))["brightness"]
    assert list(found) == [-5, 0, 2, 4, 8]
    assert found[0] > 0.2, "brightness is easily told"


def test_the_speed_of_merging_is_measured_for_each_r_and_batch(tmp_path: Path) -> None:
    speeds = measure(Case("tiny", backbone(tmp_path / "model"), (1, 2)), threads=1, blocks=2, budget_s=0.01)
    assert speeds.backend == "eager"
    assert {rows for _, rows in speeds.speedups} == {1, 2} == set(speeds.seconds)
    assert all(len(ratios) == 2 and min(ratios) > 0 for ratios in speeds.speedups.values())
