"""Tiny models that every machine can train in about a minute, so that no download is needed to serve real ones.

Importing this package imports neither torch nor transformers; training does.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pliant.cache import cache_folder, made_once
from pliant.zoo import shapes

NAMES = tuple(shapes.SHAPES)
"""The models that there are, named `zoo/NAME` elsewhere."""


@dataclass(frozen=True)
class ZooEntry:
    """A model of the zoo, and what was measured on texts that it has not seen, once it is trained.

    Classifiers have an `accuracy`, of held-out paragraphs, and language models a `perplexity`, of a token in held-out
    documents. `seconds` is the wall time that training took.
    """

    name: str
    accuracy: float | None = None
    perplexity: float | None = None
    parameters: int = 0
    seconds: float = 0.0

    @property
    def trained(self) -> bool:
        return self.parameters > 0


def folder(name: str) -> Path:
    """Where the model `name` lies, or will lie once it is trained."""
    return cache_folder() / "zoo" / f"{name}-v{shapes.SHAPES[name].version}"


def config(name: str) -> dict[str, Any]:
    """The `config.json` that the model `name` has, or will have once it is trained."""
    return shapes.SHAPES[name].config()


def status() -> list[ZooEntry]:
    """All models of the zoo, in the order of `NAMES`."""
    return [_entry(name) for name in NAMES]


def ensure(name: str, progress: Callable[[str, float], object]) -> Path:
    """The folder of the model `name`, which is trained first if this user has never done so.

    One process trains, others that ask meanwhile wait for it. `progress` is called with what is being done and the
    fraction done.
    """
    return made_once(folder(name), lambda unfinished: train(name, unfinished, progress))


def train(name: str, folder: Path, progress: Callable[[str, float], object]) -> None:
    """Train the model `name` and write it to `folder`: weights, configuration, tokenizer and `zoo.json`."""
    from pliant.zoo import llama, topics

    started = time.perf_counter()
    shape = shapes.SHAPES[name]

    def report(text: str, done: float) -> object:
        return progress(f"{text}: zoo/{name}", done)

    if isinstance(shape, shapes.LlamaShape):
        measured = asdict(llama.train(shape, folder, report))
    else:
        measured = asdict(topics.train(shape, folder, report))
    card = {
        "name": name,
        "version": shape.version,
        **measured,
        "seconds": round(time.perf_counter() - started, 1),
    }
    (folder / "zoo.json").write_text(json.dumps(card, indent=2) + "\n")


def _entry(name: str) -> ZooEntry:
    card = folder(name) / "zoo.json"
    if not card.exists():
        return ZooEntry(name)
    found = json.loads(card.read_text())
    return ZooEntry(name, found.get("accuracy"), found.get("perplexity"), found["parameters"], found["seconds"])
