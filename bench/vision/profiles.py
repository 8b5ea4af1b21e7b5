"""What a device and its tasks can do under each gamma: the paper's machine, and measured ones (OTAS §II, figures 4, 7).

The paper tells its numbers in figures of which there is only the text. What the text says of them is kept here: 580
requests per second as they are, 1,500 with 25 tokens merged, 220 with 32 prompts, table I for those in between; 100 per
second one by one, and as many as it gets in batches of 20; an accuracy that merging hardly lowers down to -15 and
sharply below, and that two prompts raise at once and more of them a little, most of all on CIFAR100.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pliant.policies.vision.token_profile import TokenProfile

MOST_ROWS = 64
"""Of a batch: the paper's epsilon."""
MODELS = ("small", "base", "large")
"""INFaaS's ViTs; the base one is what tokens are adapted of."""

_PAPER_PER_S = {-20: 1300, -15: 1000, -10: 800, -5: 680, 0: 580, 2: 540, 4: 500, 8: 440}
_PAPER_LEAST_S = 0.01
_PAPER_ACCURACIES = {
    "CIFAR10": (0.860, 0.930, 0.945, 0.952, 0.955, 0.963, 0.965, 0.967),
    "CIFAR100": (0.700, 0.790, 0.810, 0.820, 0.825, 0.845, 0.850, 0.855),
    "EuroSAT": (0.870, 0.940, 0.950, 0.955, 0.958, 0.967, 0.970, 0.972),
}
_SPEEDS = (2.6, 1.0, 0.32)
"""Of the models, over that of the base one: timm's tables of consumer GPUs, in half precision."""
_ERRORS = (1.2, 1.0, 0.88)
"""Of the models, over those of the base one: as of ViTs that are pre-trained on ImageNet-21k and tuned to CIFAR100."""
LOAD_S = (0.09, 0.35, 1.22)
"""Of the models: 22, 86 and 304 million parameters in single precision, at 1 GB/s from the disk to the GPU."""


@dataclass(frozen=True)
class Profile:
    """Seconds and accuracies by gamma; picklable."""

    name: str
    gammas: tuple[int, ...]
    """Rising; 0 is one of them."""
    seconds: tuple[tuple[float, ...], ...]
    """By gamma, then rows less 1, of 1 to 64 rows."""
    accuracies: Mapping[str, Mapping[int, float]]
    """By task, then gamma; a task may lack some, but not 0."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Three tasks in the roles of table II's CIFAR10, CIFAR100 and EuroSAT: the hardest is in the middle."""
        first, second, hardest = sorted(self.accuracies, key=lambda task: -self.accuracies[task][0])
        return first, hardest, second

    def accuracy(self, task: str, gamma: int) -> float | None:
        return self.accuracies[task].get(gamma)

    def latency(self, gamma: int, rows: int) -> float:
        return self.seconds[self.gammas.index(gamma)][rows - 1]

    def per_s(self, gamma: int = 0) -> float:
        """The capacity: images per second in the batches, of up to 64, that suit the gamma best."""
        return max(rows / seconds for rows, seconds in enumerate(self.seconds[self.gammas.index(gamma)], 1))

    def tokens(self, gammas: Sequence[int] | None = None, most_rows: int = MOST_ROWS) -> TokenProfile:
        """What policies plan with, all gammas or some."""
        return TokenProfile(
            self.gammas if gammas is None else gammas,
            self.latency,
            lambda task, gamma: self.accuracy(str(task), gamma),
            most_rows,
        )

    def models(self) -> Profile:
        """INFaaS's three models on the same device; their indices in MODELS take the place of gammas."""
        base = np.array(self.seconds[self.gammas.index(0)])
        return Profile(
            f"{self.name}, three models",
            tuple(range(len(MODELS))),
            tuple(tuple((base / speed).tolist()) for speed in _SPEEDS),
            {
                task: {model: 1 - factor * (1 - of_gamma[0]) for model, factor in enumerate(_ERRORS)}
                for task, of_gamma in self.accuracies.items()
            },
        )


def paper() -> Profile:
    """ViT-Base on the paper's RTX 4080."""
    rows = np.arange(1, MOST_ROWS + 1)
    curves = [(_PAPER_LEAST_S**4 + (rows / per_s) ** 4) ** 0.25 for per_s in _PAPER_PER_S.values()]
    return Profile(
        "paper",
        tuple(_PAPER_PER_S),
        tuple(tuple(curve.tolist()) for curve in curves),
        {task: dict(zip(_PAPER_PER_S, known, strict=True)) for task, known in _PAPER_ACCURACIES.items()},
    )


def measured(
    name: str,
    gammas: Sequence[int],
    batches: Sequence[int],
    seconds: Sequence[Sequence[float]],
    accuracies: Mapping[str, Mapping[int, float]],
) -> Profile:
    """From the seconds of some numbers of rows, [gamma][batch]; linear between them, and beyond by the last slope.

    Raises ValueError for anything but three tasks that have an accuracy at gamma 0.
    """
    if len(accuracies) != 3 or any(0 not in of_gamma for of_gamma in accuracies.values()):
        raise ValueError(f"needs three tasks with an accuracy at gamma 0, got {accuracies}")
    order = np.argsort(gammas)
    return Profile(
        name,
        tuple(gammas[place] for place in order),
        tuple(tuple(_curve(batches, seconds[place])) for place in order),
        {task: dict(of_gamma) for task, of_gamma in accuracies.items()},
    )


def write(profile: Profile, path: Path) -> None:
    """As JSON, for `read`."""
    content = {
        "name": profile.name,
        "gammas": profile.gammas,
        "batches": tuple(range(1, MOST_ROWS + 1)),
        "seconds": profile.seconds,
        "accuracies": profile.accuracies,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Profile:
    """From JSON as `write` makes it; its batches may be any."""
    content = json.loads(path.read_text())
    content["accuracies"] = {
        task: {int(gamma): accuracy for gamma, accuracy in of_gamma.items()}
        for task, of_gamma in content["accuracies"].items()
    }
    return measured(**content)


def _curve(batches: Sequence[int], seconds: Sequence[float]) -> list[float]:
    rows = np.arange(1, MOST_ROWS + 1)
    curve = np.interp(rows, batches, seconds)
    if batches[-1] < MOST_ROWS:
        slope = (seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2]) if len(batches) > 1 else seconds[-1]
        curve = np.where(rows > batches[-1], seconds[-1] + (rows - batches[-1]) * slope, curve)
    return [float(value) for value in curve]
