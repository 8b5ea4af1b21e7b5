"""The models of a task, from the smallest: the zoo's, or layers of a pretrained encoder, fine-tuned once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pliant.bench.cascade import early_exit, fine_tuning, tasks
from pliant.bench.cascade.fine_tuning import Recipe
from pliant.bench.cascade.tasks import Splits
from pliant.cache import cache_folder, made_once
from pliant.models import sources
from pliant.training import early_layers

_log = logging.getLogger("pliant")

LAYERS = (1, 2, 3, 6)
"""Of the models that are fine-tuned; the last is the whole encoder."""
_VERSION = 2
"""Raised whenever training changes."""
ZOO_TASK = "topics"
ZOO = {"small": "zoo/topics-small", "large": "zoo/topics-large"}


@dataclass(frozen=True)
class FineTuned:
    """A public data set, and how models learn it."""

    name: str
    read: Callable[[Path], Splits]
    whole: Recipe
    """Of the whole encoder."""
    first_layers: Recipe
    with_exits: early_layers.Recipe
    """Of the whole encoder together with exits behind its layers."""

    def folder(self, layers: int, splits: Splits) -> Path:
        """Where the model of so many layers lies, or will lie: another one for other texts, recipes and teachers."""
        teacher = "" if layers == LAYERS[-1] else self.folder(LAYERS[-1], splits).name
        made_from = [_VERSION, layers, asdict(self.recipe(layers)), splits.labels, splits.train, teacher]
        digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:8]
        return cache_folder() / "bench" / "cascade" / f"{self.name}-{layers}-{digest}"

    def exits(self, splits: Splits) -> Path:
        """Where the classifiers of the whole encoder's layers lie, or will lie."""
        whole = self.folder(LAYERS[-1], splits)
        return whole.with_name(f"{whole.name}-exits")

    def recipe(self, layers: int) -> Recipe:
        return self.whole if layers == LAYERS[-1] else self.first_layers

    def trained(self, splits: Splits) -> bool:
        """Whether all models are there, and their exits."""
        return all(path.exists() for path in (self.exits(splits), *(self.folder(one, splits) for one in LAYERS)))


def _small(fragments: int) -> Recipe:
    return Recipe(batch=64, learning_rate=2e-4, fragments=fragments)


WITH_EXITS = early_layers.Recipe(epochs=3)
FINE_TUNED = (
    FineTuned("sst2", tasks.sst2, Recipe(), _small(10), replace(WITH_EXITS, fragments=5)),
    FineTuned("clinc150-pairs", tasks.clinc150_pairs, Recipe(), _small(1), WITH_EXITS),
    FineTuned("clinc150", tasks.clinc150, Recipe(), _small(2), WITH_EXITS),
)
"""Small models also learn what the whole one makes of texts and of fragments of them (distillation): with the same
texts one layer then gets 91.6% of CLINC150's choose split right instead of 85.2%."""


@dataclass(frozen=True)
class Prepared:
    """A task whose models are there."""

    name: str
    splits: Splits
    folders: Mapping[str, Path]
    """Models by name, the small ones first."""
    layers: Mapping[str, int]
    """Of the models that are the first layers of one encoder."""
    exits: Path | None
    """Classifiers for each layer of the whole encoder, if it has any."""
    with_exits: early_layers.Recipe
    """How the largest model's layers learn together with exits."""


def zoo() -> Prepared:
    """The zoo's text classifiers, trained on first use."""
    folders = {name: sources.fetch(model) for name, model in ZOO.items()}
    return Prepared(ZOO_TASK, tasks.topics(), folders, {}, None, WITH_EXITS)


def fine_tuned(task: FineTuned, splits: Splits, progress: Callable[[str, float], object]) -> Prepared:
    """The models of `task`; what is not there yet learns now, the whole encoder first, each in minutes.

    Raises ModelError where the encoder is missing.
    """
    folders = {layers: task.folder(layers, splits) for layers in LAYERS}
    whole = folders[LAYERS[-1]]
    for layers, folder in reversed(folders.items()):

        def make(into: Path, layers: int = layers) -> None:
            what = f"{layers} layers learn {task.name}"
            _log.warning("%s from %d texts, once; this takes minutes", what, len(splits.train))
            recipe = task.recipe(layers)
            fine_tuning.fine_tune(
                splits.train, splits.labels, layers, recipe, into, lambda done: progress(what, done), whole
            )

        made_once(folder, make)

    def learn_exits(into: Path) -> None:
        progress(f"exits learn {task.name}", 0.0)
        early_exit.learn(whole, splits.train, splits.labels, into)

    exits = made_once(task.exits(splits), learn_exits)
    named = {f"minilm-{layers}": layers for layers in LAYERS}
    by_name = {name: folders[layers] for name, layers in named.items()}
    return Prepared(task.name, splits, by_name, named, exits, task.with_exits)
