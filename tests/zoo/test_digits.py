"""The zoo's vision transformer and its tasks, at a size that learns in seconds, as what is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.vision_folders import vision_folder
from typer.testing import CliRunner

from pliant import zoo
from pliant.cli import command
from pliant.errors import ModelError
from pliant.formats.vision_task import read_profiling, read_task
from pliant.models import sources
from pliant.models.vision_info import VisionInput, read_vision
from pliant.torchvision_ops import declare
from pliant.training.vision import normalised
from pliant.zoo import digits, digits_vit, shapes
from pliant.zoo.shapes import TaskShape, VitShape

declare()
import timm  # noqa: E402

from pliant.kernels.vision.vit import TokenAdaptiveViT  # noqa: E402

TINY = VitShape(layers=2, hidden=24, heads=2, epochs=2, learning_rate=5e-3, patch=8)
TASKS = {name: TaskShape(epochs=1, learning_rate=0.05, gammas=(2, 3)) for name in ("digit", "parity")}
Reports = list[tuple[str, float]]


@pytest.fixture(scope="module")
def tiny_zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(shapes.SHAPES, shapes.BACKBONE, TINY)
        patch.setattr(shapes, "TASKS", TASKS)
        yield


@pytest.fixture(scope="module")
def reports(tiny_zoo: None) -> Reports:
    """What was reported while they were trained."""
    found: Reports = []
    sources.fetch_tasks("zoo/digits-tasks", lambda text, done: found.append((text, done)))
    return found


@pytest.fixture(scope="module")
def folder(reports: Reports) -> Path:
    return sources.fetch_tasks("zoo/digits-tasks")


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Path:
    return sources.fetch_vision("zoo/digits-vit")


def test_the_images_are_parted_and_upscaled() -> None:
    parts = (digits.training(), digits.profiling(), digits.held_out())
    assert [len(part.labels) for part in parts] == [1078, 360, 359]
    assert {part.images.shape[1:] for part in parts} == {(32, 32, 3)}
    seen = [image.tobytes() for part in parts for image in part.images]
    assert len(set(seen)) == len(seen) == 1797
    for part in parts:
        assert np.bincount(part.labels).min() > len(part.labels) / 20
        assert part.images.min() == 0
        assert part.images.max() == 255


def test_the_tasks_ask_what_they_say() -> None:
    answers = {name: [task.labels[index] for index in task.label(np.arange(10))] for name, task in digits.TASKS.items()}
    assert answers == {
        "digit": [str(digit) for digit in range(10)],
        "parity": ["even", "odd"] * 5,
        "at-least-five": ["below five"] * 5 + ["at least five"] * 5,
    }
    groups = [shapes.GROUPS[index] for index in digits.group(np.arange(10))]
    assert all(str(digit) in group for digit, group in enumerate(groups))
    assert shapes.TASKS.keys() <= digits.TASKS.keys()


def test_they_are_trained_once_after_their_model_and_say_how_far_they_are(reports: Reports, folder: Path) -> None:
    told = list(dict.fromkeys(text for text, _ in reports))
    assert told == ["training zoo/digits-vit", "training zoo/digits-tasks"]
    fractions = [done for text, done in reports if "digits-tasks" in text]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    again: Reports = []
    assert sources.fetch_tasks("zoo/digits-tasks", lambda text, done: again.append((text, done))) == folder
    assert not again


def test_what_is_known_before_training_holds_after_it(backbone: Path) -> None:
    before, info = sources.check_vision("zoo/digits-vit"), read_vision(backbone)
    assert before == VisionInput(**{key: getattr(info, key) for key in vars(before)})
    assert (info.layers, info.hidden, info.patch, info.prefix, info.tokens) == (2, 24, 8, 0, 16)
    assert info.labels == shapes.GROUPS


def test_timm_reads_the_model_that_was_measured(backbone: Path) -> None:
    model = timm.create_model(f"local-dir:{backbone}", pretrained=True).eval()
    card = json.loads((backbone / "zoo.json").read_text())
    assert card["parameters"] == sum(map(torch.numel, model.parameters()))
    examples = digits.profiling()
    with torch.inference_mode():
        found = model(normalised(examples.images, read_vision(backbone))).argmax(1).numpy()
    assert (found == digits.group(examples.labels)).mean() == card["accuracy"]
    assert card["accuracy"] > 0.3


def test_each_task_is_a_folder_that_is_served(folder: Path, backbone: Path) -> None:
    assert {entry.name for entry in folder.iterdir() if entry.is_dir()} == set(TASKS)
    for name, shape in TASKS.items():
        task = read_task(folder / name, read_vision(backbone))
        assert task.name == name
        assert task.prompts == shape.gammas
        assert list(task.accuracies) == [0, *shape.gammas]
        images, labels = read_profiling(task)
        assert np.array_equal(images, digits.profiling().images)
        assert np.array_equal(labels, digits.TASKS[name].label(digits.profiling().labels))


def test_features_are_those_of_the_served_model(backbone: Path) -> None:
    model = timm.create_model(f"local-dir:{backbone}", pretrained=True).eval()
    images, prompts = torch.rand(3, 3, 32, 32), torch.randn(1, 2, 5, 24)
    with torch.inference_mode():
        ours, served = digits_vit.prompted(model), TokenAdaptiveViT(model)
        torch.testing.assert_close(ours(images), served(images))
        torch.testing.assert_close(ours(images, 5, prompts), served(images, 5, prompts))


def test_the_status_and_the_command_tell_what_was_measured(folder: Path, backbone: Path) -> None:
    entries = {entry.name: entry for entry in zoo.status()}
    task = read_task(folder / "parity", read_vision(backbone))
    found = entries["digits-tasks/parity"]
    assert (found.accuracy, found.prompted_accuracy) == (task.accuracies[0], max(task.accuracies.values()))
    assert found.parameters == sum(map(torch.numel, load_file(folder / "parity" / "task.safetensors").values()))
    said = " ".join(CliRunner().invoke(command.app, ["zoo"]).output.split())
    assert "zoo/digits-vit" in said
    assert "zoo/digits-tasks/parity" in said
    assert f"accuracy {found.accuracy:.1%} → {found.prompted_accuracy:.1%}" in said
    assert "tasks, and what prompts give them, on the profiling images" in said


def test_training_repeats_itself_and_leaves_the_callers_random_numbers_alone(backbone: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    digits_vit.train(TINY, tmp_path, lambda _text, _done: None)
    assert torch.equal(torch.random.get_rng_state(), state)
    once, again = (load_file(part / "model.safetensors") for part in (backbone, tmp_path))
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_another_version_of_the_model_has_tasks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = zoo.folder(zoo.TASKS)
    monkeypatch.setitem(shapes.SHAPES, shapes.BACKBONE, VitShape(**{**vars(TINY), "version": 2}))
    assert zoo.folder(zoo.TASKS) != before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("zoo/digits-task", "the zoo has no such tasks; choose zoo/digits-tasks"),
        ("zoo/adapters", "choose zoo/digits-tasks"),
        ("./no/such", "no such folder; choose one that holds tasks"),
    ],
)
def test_what_holds_no_tasks_is_refused(given: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        sources.fetch_tasks(given)
    assert str(caught.value).startswith(f"{given}: ")


def test_what_is_no_vision_transformer_is_refused(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"zoo/topics-small: its config\.json names no timm architecture"):
        sources.check_vision("zoo/topics-small")
    with pytest.raises(ModelError, match="has no config"):
        sources.fetch_vision(str(tmp_path))
    assert sources.fetch_vision(str(backbone)) == backbone


def test_a_downloaded_model_is_kept_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    asked: list[str] = []

    def snapshot(model: str, allow_patterns: object = None, local_files_only: bool = False) -> str:
        if not local_files_only:
            asked.append(model)
            vision_folder(tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for _ in range(2):
        assert sources.fetch_vision("owner/model") == tmp_path / "snapshot"
    assert asked == ["owner/model"]
