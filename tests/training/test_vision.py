"""Heads and prompts that are trained on a frozen backbone, at a size that learns in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.vision_folders import vision_folder, vision_model

from pliant.formats.vision_task import WEIGHTS, head_names, prompts_name, read_profiling, read_task
from pliant.models.vision_head import Head
from pliant.models.vision_info import VisionInfo
from pliant.torchvision_ops import declare
from pliant.training.vision import Examples, Recipe, Task, Trainer, normalised

declare()
from pliant.kernels.vision.vit import TokenAdaptiveViT  # noqa: E402

TASK = Task("bright", ("dark", "bright"), 500, 0.5)
SHORT = Recipe(batch=8, epochs=3, learning_rate=0.02)
LONG = Recipe(batch=8, epochs=15, learning_rate=0.1)


def examples(count: int, seed: int) -> Examples:
    """Noise, of which half is a little brighter."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    noise = random.integers(0, 200, (count, 16, 16, 3))
    return Examples((noise + 25 * labels[:, None, None, None]).astype(np.uint8), labels)


TRAINING, PROFILING = examples(48, 0), examples(40, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_model().requires_grad_(False)


@pytest.fixture(scope="module")
def info(model: Any, tmp_path_factory: pytest.TempPathFactory) -> VisionInfo:
    return vision_folder(tmp_path_factory.mktemp("model"), model)


@pytest.fixture(scope="module")
def trainer(model: Any, info: VisionInfo) -> Trainer:
    return Trainer(TokenAdaptiveViT(model), info, SHORT, LONG)


@pytest.fixture(scope="module")
def reports() -> list[tuple[str, float]]:
    return []


@pytest.fixture(scope="module")
def folder(trainer: Trainer, reports: list[tuple[str, float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "bright"
    trainer.train(TASK, TRAINING, PROFILING, (2, -4, 3), folder, lambda text, done: reports.append((text, done)))
    return folder


def test_what_is_written_is_a_task_of_the_backbone(folder: Path, info: VisionInfo) -> None:
    task = read_task(folder, info)
    assert (task.name, task.labels, task.slo_ms, task.utility) == tuple(TASK)
    assert task.prompts == (2, 3)
    assert task.heads == (-4, 2, 3)
    assert list(task.accuracies) == [-4, 0, 2, 3]
    for kept, given in zip(read_profiling(task), PROFILING, strict=True):
        assert np.array_equal(kept, given)


def test_accuracies_are_those_of_what_was_written(folder: Path, trainer: Trainer, info: VisionInfo) -> None:
    tensors, accuracies = load_file(folder / WEIGHTS), read_task(folder, info).accuracies
    for gamma, accuracy in accuracies.items():
        head = Head(*(tensors[name] for name in head_names(gamma)))
        assert trainer.accuracy(PROFILING, head, gamma, tensors.get(prompts_name(gamma))) == accuracy
    assert accuracies[0] > 0.6


def test_prompts_and_heads_fit_the_training_images(folder: Path, model: Any, info: VisionInfo) -> None:
    """Prompts better than none, and a head better than that of another gamma."""
    tensors = load_file(folder / WEIGHTS)

    def loss(gamma: int, head_of: int) -> float:
        prompts = tensors[prompts_name(gamma)][None] if gamma > 0 else None
        features = TokenAdaptiveViT(model)(normalised(TRAINING.images, info), gamma, prompts)
        logits = torch.nn.functional.linear(features, *(tensors[name] for name in head_names(head_of)))
        return float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(TRAINING.labels)))

    for gamma in (2, 3):
        assert loss(gamma, gamma) < min(loss(0, 0), loss(gamma, 0))
    assert loss(-4, -4) < loss(-4, 0)


def test_progress_rises_to_the_end(folder: Path, reports: list[tuple[str, float]]) -> None:
    fractions = [done for _, done in reports]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    told = list(dict.fromkeys(text for text, _ in reports))
    assert told == [
        "learning a head",
        "learning a head for 4 merged tokens a layer",
        "learning 2 prompts a layer",
        "learning 3 prompts a layer",
        "learning",
    ]


def test_training_repeats_itself_and_leaves_the_callers_random_numbers_and_the_backbone_alone(
    folder: Path, trainer: Trainer, model: Any, tmp_path: Path
) -> None:
    state, before = torch.random.get_rng_state(), {name: each.clone() for name, each in model.state_dict().items()}
    trainer.train(TASK, TRAINING, PROFILING, (3,), tmp_path, lambda _text, _done: None)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    once, again = load_file(folder / WEIGHTS), load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(once[name], tensor) for name, tensor in again.items())


def test_images_become_what_timm_makes_of_them(info: VisionInfo) -> None:
    from PIL import Image
    from timm.data import create_transform

    transform = create_transform(input_size=(3, 16, 16), is_training=False, mean=info.mean, std=info.std, crop_pct=1.0)
    expected = torch.stack([transform(Image.fromarray(image)) for image in TRAINING.images])
    torch.testing.assert_close(normalised(TRAINING.images, info), expected)


def test_the_defaults_are_the_papers() -> None:
    assert Recipe() == Recipe(batch=32, epochs=50, learning_rate=0.002)
