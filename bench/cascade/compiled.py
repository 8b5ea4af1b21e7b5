"""A task's models, compiled for one thread and any length, in this process (Tabi §7.1: one text at a time)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from pliant.bench.cascade.levels import Prepared
from pliant.deployments.cascade.pruning import Read, read_words
from pliant.deployments.cascade.readings import Level, Seen
from pliant.deployments.serving.tokenizing import encoded
from pliant.kernels.encoder import compiled_classifier, importance_classifier
from pliant.kernels.encoder.importance_classifier import WithImportance
from pliant.models.sources import describe
from pliant.policies.cascade.label_agreement import columns
from pliant.texts import Text

Wanted = Callable[[NDArray[np.float32]], bool]
"""Whether importance is wanted with these logits."""


class Model:
    """One of a task's models. Its logits are in the task's order of labels, and each text has its own length.

    It has two runtimes: one as a service of this model alone, and one as a level of a cascade that must tell.
    """

    def __init__(self, level: Level, folder: Path, longest: int) -> None:
        self.level = level
        self.bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        """Of its weights."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(longest)
        self._columns = list(columns(level.labels, describe(folder).labels))
        self._plain = compiled_classifier.load(folder, longest, dynamic=True)
        self._stepwise = importance_classifier.load(folder, longest, dynamic=True)

    def encode(self, text: Text) -> Encoding:
        return encoded(self._tokenizer, text)

    def read(self, encoding: Encoding) -> NDArray[np.float32]:
        """Its logits, as the model alone."""
        logits: NDArray[np.float32] = self._plain(encoding.ids, encoding.type_ids)[self._columns]
        return logits

    def with_importance(self, encoding: Encoding, wanted: Wanted) -> WithImportance:
        """Its logits as a level of a cascade, and the importance of tokens if it can tell and these want it."""
        if not self.level.importance:
            return WithImportance(self.read(encoding), None, 0.0)
        told = self._stepwise.with_importance(encoding.ids, encoding.type_ids, wanted)
        return told._replace(logits=told.logits[self._columns])

    def words(self, text: Text) -> Read:
        """The words of `text` and how important they are, also for a level that need not tell."""
        encoding = self.encode(text)
        importance = self._stepwise.with_importance(encoding.ids, encoding.type_ids, lambda _: True).importance
        assert importance is not None
        return read_words(text, encoding, importance)


class CompiledReader:
    """Where a cascade's profile finds its levels: here."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        model = self._models[service]
        started = time.perf_counter()
        encoding = model.encode(text)
        encoded = time.perf_counter()
        told = model.with_importance(encoding, lambda _: importance)
        computed_s = time.perf_counter() - encoded - told.importance_s
        return Seen(
            told.logits, told.importance, encoding, encoded - started + computed_s, told.importance_s, computed_s
        )


def load(
    folders: Mapping[str, Path], labels: Sequence[str], longest: int, progress: Callable[[str], object]
) -> dict[str, Model]:
    """The models, from the smallest, for texts of up to so many tokens; all but the last tell."""
    models = {}
    for name, folder in folders.items():
        progress(f"compiling {name}")
        models[name] = Model(Level(name, tuple(labels), importance=name != [*folders][-1]), folder, longest)
    return models


def longest(prepared: Prepared) -> int:
    """Tokens of the longest text that is not to train on, for any of the models, as far as all of them take it."""
    splits = prepared.splits
    texts = [text.text for text in (*splits.choose, *splits.test)]
    found = 0
    for folder in prepared.folders.values():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        found = max(found, *(len(encoding) for encoding in tokenizer.encode_batch(texts)))
    return min(found, *(describe(folder).max_length for folder in prepared.folders.values()))
