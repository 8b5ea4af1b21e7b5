"""CIFAR-10, EuroSAT and Fashion-MNIST as tasks of one frozen vision transformer: trained once, measured on held-out
images under every gamma (OTAS §V; figures 4 and 7)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot
from numpy.typing import NDArray

from pliant.bench.findings import Findings
from pliant.bench.report import Figure, Options, Row
from pliant.bench.vision import profiles, real_tasks_backbone
from pliant.bench.vision.profiles import Profile
from pliant.bench.vision.real_tasks_backbone import Backbone
from pliant.bench.vision.real_tasks_data import TASKS, Parts, RealTask
from pliant.bench.vision.second_passes import Answers, answered
from pliant.cache import cache_folder, made_once
from pliant.config.vision import VisionConfig
from pliant.deployments.vision import assembly
from pliant.deployments.vision.device import Executor
from pliant.kernels.vision.model import load_model
from pliant.kernels.vision.vit import TokenAdaptiveViT
from pliant.models.vision_info import merging_gammas
from pliant.training.vision import Examples, Recipe, Task, Trainer
from pliant.zoo.repeatable import one_thread

_log = logging.getLogger("pliant")

PROMPTS = (2, 4, 8)
_SLO_MS = 600.0
_EPOCHS = 50
"""For which a gamma's prompts learn, as in the paper, but for no more than so many steps of 32 images."""
_MOST_STEPS = 4500
_LEARNING_RATE = 0.03
_FILE = "profile.json"
_VERSION = 2
"""Raised whenever the tasks are trained or measured in another way."""


class RealTasks(NamedTuple):
    """A backbone and its tasks, as a service takes them, and the images that nothing has seen."""

    model: Path
    tasks: Mapping[str, Path]
    held_out: Mapping[str, Examples]


def prepared(data: Path) -> RealTasks:
    """Trained on the data sets in the folder `data`, in an hour and a half, if this user never did so.

    Raises PliantError if one of them is not there.
    """
    parts = {task.name: task.parts(data) for task in TASKS}
    root = cache_folder() / "bench"
    shape = Backbone()

    def train_backbone(folder: Path) -> None:
        _log.warning("training a backbone and three tasks on %s, once; this takes an hour and a half", data)
        known = [(parts[task.name].training, task.groups) for task in TASKS]
        real_tasks_backbone.train(shape, known, folder)

    model = made_once(root / f"real-tasks-backbone-v{shape.version}", train_backbone)
    folders = {}
    for task in TASKS:

        def train_task(folder: Path, task: RealTask = task) -> None:
            train(task, parts[task.name], model, folder)

        folders[task.name] = made_once(root / f"real-tasks-v{_VERSION}-of-v{shape.version}" / task.name, train_task)
    return RealTasks(model, folders, {name: each.held_out for name, each in parts.items()})


def train(task: RealTask, parts: Parts, model: Path, folder: Path) -> None:
    """Train a head and prompts on the frozen `model`, and write them to `folder` as a service takes them."""
    info, vit = load_model(model, "float32", "cpu")
    epochs = max(1, min(_EPOCHS, round(_MOST_STEPS * 32 / len(parts.training.labels))))
    prompts = Recipe(epochs=epochs, learning_rate=_LEARNING_RATE)
    trainer = Trainer(TokenAdaptiveViT(vit), info, prompts=prompts)
    with one_thread():
        trainer.train(
            Task(task.name, task.labels, _SLO_MS, 1.0),
            parts.training,
            parts.profiling,
            (*merging_gammas(info), 0, *PROMPTS),
            folder,
            lambda text, done: None,
        )


def profile(options: Options) -> Profile | None:
    """Measured latency, and accuracy on held-out images, of the real tasks on this machine; None without their data.

    On a CPU with one thread, compiled. Kept in the user's cache.
    """
    if options.data is None:
        return None
    real = prepared(options.data)

    loaded = assembly.load(service(real))
    name = f"real-tasks-profile-v{_VERSION}-{loaded.identity[:16]}"

    def measure(folder: Path) -> None:
        found = accuracies(loaded.executor, real, loaded.gammas)
        rows = range(1, profiles.MOST_ROWS + 1)
        seconds = [[loaded.latency(gamma, row) for row in rows] for gamma in loaded.gammas]
        measured = profiles.measured("real tasks", loaded.gammas, rows, seconds, found)
        profiles.write(measured, folder / _FILE)

    return profiles.read(made_once(cache_folder() / "bench" / name, measure) / _FILE)


def answers(options: Options) -> dict[str, dict[int, Answers]]:
    """To the held-out images, by task and gamma."""
    assert options.data
    real = prepared(options.data)
    loaded = assembly.load(service(real))
    return _answers(loaded.executor, real, loaded.gammas)


def service(real: RealTasks) -> VisionConfig:
    """A service of these tasks."""
    folder = next(iter(real.tasks.values())).parent
    return VisionConfig(kind="vision", model=str(real.model), tasks={"folder": str(folder)}, compile=True)  # type: ignore[arg-type]


def accuracies(executor: Executor, real: RealTasks, gammas: Sequence[int]) -> dict[str, dict[int, float]]:
    """The share of each task's held-out images that it gets right, by gamma."""
    return {
        name: {gamma: float(answers.right.mean()) for gamma, answers in of_gamma.items()}
        for name, of_gamma in _answers(executor, real, gammas).items()
    }


def _answers(executor: Executor, real: RealTasks, gammas: Sequence[int]) -> dict[str, dict[int, Answers]]:
    found = {}
    for name, folder in real.tasks.items():
        executor.add_task(name, executor.stage(folder))

        def run(images: NDArray[np.uint8], gamma: int, name: str = name) -> Sequence[NDArray[np.float32]]:
            return executor.run(images, [name] * len(images), gamma)

        found[name] = answered(run, *real.held_out[name], gammas, executor.most_rows)
        executor.remove_task(name)
    return found


def compare(options: Options) -> Findings:
    """Accuracy and speed by gamma: what prompts add, and what merging costs and saves. Nothing without data."""
    measured = profile(options)
    if measured is None:
        return Findings()
    found = Findings(plots={"real-tasks": _plot(measured)})
    for task, of_gamma in measured.accuracies.items():
        best = max((gamma for gamma in of_gamma if gamma > 0), key=lambda gamma: of_gamma[gamma])
        value = of_gamma[best] - of_gamma[0]
        beside = f"{of_gamma[0]:.3f} without, {of_gamma[best]:.3f} with {best}"
        found.figures.append(Figure(f"prompts_gain_{task}", value, value, value, "> 0", beside))
        listed = ", ".join(f"{gamma}: {accuracy:.3f}" for gamma, accuracy in of_gamma.items())
        found.rows.append(Row(f"accuracy of {task} by gamma", "figure 4b", listed))
    speeds = ", ".join(f"{gamma}: {measured.per_s(gamma) / measured.per_s():.2f}" for gamma in measured.gammas)
    found.rows.append(Row("images per second by gamma, of those at 0", "1500 / 580 at -25, 220 / 580 at 32", speeds))
    return found


def _plot(measured: Profile) -> Plot:
    """Accuracy over images per second; a point for each gamma."""
    plot, axes = plt.subplots(figsize=(7, 4))
    speeds = [measured.per_s(gamma) for gamma in measured.gammas]
    for task, of_gamma in measured.accuracies.items():
        axes.plot(speeds, [of_gamma[gamma] for gamma in measured.gammas], marker="o", label=task)
    for gamma, speed in zip(measured.gammas, speeds, strict=True):
        axes.annotate(str(gamma), (speed, min(of[gamma] for of in measured.accuracies.values())), fontsize=8)
    axes.set(xlabel="images per second", ylabel="accuracy on held-out images")
    axes.legend()
    return plot
