"""Trains the zoo's vision tasks: heads and prompts on the frozen transformer that tells pairs of digits apart."""

from dataclasses import dataclass
from pathlib import Path

from pliant.models.vision_info import read_vision
from pliant.training.vision import Examples, Recipe, Task, Trainer
from pliant.zoo import digits
from pliant.zoo.digits_vit import create, prompted
from pliant.zoo.repeatable import one_thread
from pliant.zoo.shapes import Progress, TaskShape


@dataclass(frozen=True)
class Result:
    """What training gave: `accuracy` on the profiling images without prompts, and the best with some."""

    accuracy: float
    prompted_accuracy: float
    parameters: int


def train(name: str, shape: TaskShape, backbone: Path, folder: Path, report: Progress) -> Result:
    """Train the task `name` of the model in `backbone` and save it to `folder`; same seed, same tensors."""
    info = read_vision(backbone)
    model = create(backbone, pretrained=True).eval().requires_grad_(False)
    trainer = Trainer(prompted(model), info, prompts=Recipe(shape.batch, shape.epochs, shape.learning_rate))
    given = digits.TASKS[name]
    task = Task(name, given.labels, given.slo_ms, given.utility)
    training, profiling = (_examples(part, name) for part in (digits.training(), digits.profiling()))
    with one_thread():
        accuracies = trainer.train(task, training, profiling, shape.gammas, folder, report)
    heads = (1 + len(shape.gammas)) * len(given.labels) * (info.hidden + 1)
    parameters = heads + sum(shape.gammas) * info.layers * info.hidden
    return Result(accuracies[0], max(accuracies.values()), parameters)


def _examples(examples: Examples, name: str) -> Examples:
    return Examples(examples.images, digits.TASKS[name].label(examples.labels))
