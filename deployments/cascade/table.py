"""What is known of a cascade's levels and of the cascades that they make, and how it is kept."""

from __future__ import annotations

import functools
import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from pliant.cache import made_once
from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.pruning import Read
from pliant.deployments.serving.choosing import profiles
from pliant.models import encoder_exits
from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.tables import reference
from pliant.policies.encoder.confidence import confidence
from pliant.training.labelled_texts import LabelledText

RECIPE = 5
"""Rises when profiles made before are no good any more."""

_TABLE, _READINGS = "table.json", "readings.npz"
FILES = (_TABLE, _READINGS)
"""Of a profile's folder."""
KEPT = "cascades"
"""The folder of the cache with the profiles."""

_DESCRIPTIONS = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Files of a model, besides weights, by which its answers differ."""

_DAMAGED = (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error)
"""Raised by reading a profile that is not as it was written."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LevelTable(_Frozen):
    """One model on the whole texts that cascades are chosen on."""

    name: str
    temperature: float
    accuracy: float
    calibration_error_before: float
    """Expected calibration error without the temperature."""
    calibration_error_after: float
    mean_latency_s: float
    p99_latency_s: float
    handed_s: float = 0.0
    """What a text that comes from another model takes longer: a model that was not at work, a decision, and a vote."""


class PruningAgreement(_Frozen):
    """Whether two levels find the same words important (`pruning_agreement.Agreement`)."""

    pruner: str
    reader: str
    top_half: float
    spearman: float
    texts: int


class CascadeTable(_Frozen):
    """What people read, and what a cascade is chosen from."""

    labels: tuple[str, ...]
    """In the order of the first level."""
    seed: int
    texts: int
    """That everything was measured on."""
    left_out: int
    """Texts that some level cannot take."""
    pairs: bool = False
    """Whether each is a pair."""
    levels: tuple[LevelTable, ...]
    agreements: tuple[PruningAgreement, ...]
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> int:
        """The level that losses of accuracy are counted from: the most accurate, and of several such the fastest."""
        return reference([level.accuracy for level in self.levels], [level.mean_latency_s for level in self.levels])


@dataclass(frozen=True, eq=False)
class Profiled:
    """A table, and the readings behind it: of each level [levels] and text [n] that cascades are chosen on."""

    table: CascadeTable
    probabilities: Floats
    """Calibrated, [levels, n, labels]."""
    latency_s: Floats
    """[levels, n]"""
    truth: NDArray[np.integer]
    """[n], indices of labels."""
    draws: Floats
    """[n], of the first level."""
    given: NDArray[np.integer]
    """[n], the place of each among the texts that were given: those that all levels can take."""
    importance: Mapping[str, Sequence[Read]]
    """By level that tells: the words of each text. Kept as numbers alone."""

    @property
    def confidence(self) -> Floats:
        """[levels, n]"""
        return confidence(self.probabilities)


def identity(
    config: CascadeConfig,
    encoders: Mapping[str, EncoderConfig],
    folders: Mapping[str, Path],
    texts: Iterable[LabelledText],
    run_on: Mapping[str, Sequence[str]],
) -> str:
    """Names a profile: another one is needed when a model, what runs it, or the texts change.

    `folders` are those of the models by service, whose files count by their content, so that all nodes name it alike,
    and `run_on` says on what each runs (`levels.run_on`). Reads them whole, once.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps(text).encode())
    levels = []
    for name in config.parts():
        service = encoders[name]
        kept = {"lengths", "dtype", "cpus", "gpus", "importance", "truncate", "exits"}
        files = [*folders[name].glob("*.safetensors"), *(folders[name] / each for each in _DESCRIPTIONS)]
        if service.with_exits:
            files += (folders[name] / encoder_exits.FOLDER).iterdir()
        digests = [(file.name, _digest(file, file.stat().st_mtime_ns)) for file in sorted(files) if file.is_file()]
        levels.append([name, service.model_dump(include=kept), digests, run_on[name]])
    whole = json.dumps([RECIPE, config.levels, levels, digest.hexdigest(), config.seed, config.prune], default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def _digest(file: Path, _changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def folder_of(service: str, identity: str) -> Path:
    """Where the profile of this identity lies, or will lie."""
    return profiles.folder_of(KEPT, service, identity)


def load(folder: Path) -> Profiled | None:
    """The profile in `folder`, if it is there and undamaged."""
    return profiles.load(folder, _read, _DAMAGED)


def _read(folder: Path) -> Profiled:
    table = CascadeTable.model_validate_json((folder / _TABLE).read_bytes())
    with np.load(folder / _READINGS) as arrays:
        return Profiled(
            table=table,
            probabilities=arrays["probabilities"],
            latency_s=arrays["latency_s"],
            truth=arrays["truth"],
            draws=arrays["draws"],
            given=arrays["given"],
            importance={},
        )


def keep(folder: Path, profiled: Profiled) -> None:
    """Write the `FILES` of a profile into `folder`, unless they are there already."""

    def write(into: Path) -> None:
        (into / _TABLE).write_text(profiled.table.model_dump_json(indent=1))
        arrays = {
            "probabilities": profiled.probabilities,
            "confidence": profiled.confidence,
            "latency_s": profiled.latency_s,
            "truth": profiled.truth,
            "draws": profiled.draws,
            "given": profiled.given,
        }
        for level, read in profiled.importance.items():
            arrays[f"importance.{level}"] = np.concatenate([words.importance for text in read for words in text])
            arrays[f"words.{level}"] = np.array([sum(len(words.spans) for words in text) for text in read])
        np.savez_compressed(into / _READINGS, allow_pickle=False, **arrays)

    made_once(folder, write)
