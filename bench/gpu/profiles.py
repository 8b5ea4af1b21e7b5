"""What stages measured, in the forms that simulations read.

profile-gpu.json is a `pliant.simulation.llm.hardware.Gpu`, with what was measured in place of what the maker says.
profile-encoders.json is a `pliant.bench.encoder.profiles.Measured` of BERT-base. profile-vision.json is a
`pliant.bench.vision.profiles.Profile`, with the accuracies of the paper's tasks: weights are random here.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pliant.bench.encoder.profiles import Measured
from pliant.bench.vision import profiles
from pliant.bench.vision.profiles import Profile
from pliant.errors import PliantError
from pliant.simulation.llm.hardware import Gpu

_GPU = "profile-gpu.json"
_ENCODERS = "profile-encoders.json"
_VISION = "profile-vision.json"
_ENCODER = "BERT-base"
"""The model of the paper's that is simulated."""


def write(out: Path) -> None:
    """Those of the stages whose files are in `out`; none of a stage that did not get that far, or ran on a CPU."""
    probe, encoders, vision = (_read(out / f"{name}.json") for name in ("probe", "encoders", "vision"))
    figures, device = probe["figures"], probe["device"]
    if {"bytes_per_s", "flops"} <= figures.keys() and "memory_bytes" in device:
        gpu = Gpu(device["name"], device["memory_bytes"], figures["bytes_per_s"], figures["flops"])
        (out / _GPU).write_text(json.dumps(asdict(gpu), indent=1) + "\n")
    table = encoders["tables"].get(_ENCODER, {})
    if {"static_s", "dynamic_s", "packed_s_by_texts"} <= table.keys():
        Measured.of(encoders["device"]["name"], table).write(out / _ENCODERS)
    if vision["tables"]:
        table = list(vision["tables"].values())[-1]  # prepared, if it came to that
        measured = profiles.measured(
            vision["device"]["name"],
            table["gammas"],
            table["batches"],
            table["seconds"],
            profiles.paper().accuracies,
        )
        profiles.write(measured, out / _VISION)


def measured_gpu(folder: Path) -> Gpu:
    """What `write` left there. Raises PliantError if it left none."""
    return Gpu(**json.loads(_written(folder, _GPU, "probe").read_text()))


def measured_encoder(folder: Path) -> Measured:
    """As `measured_gpu`, of a text classifier on it."""
    return Measured.read(_written(folder, _ENCODERS, "encoders"))


def measured_vision(folder: Path) -> Profile:
    """As `measured_gpu`, of a vision transformer on it."""
    return profiles.read(_written(folder, _VISION, "vision"))


def _written(folder: Path, name: str, stage: str) -> Path:
    file = folder / name
    if not file.exists():
        raise PliantError(f"{file} is not there; python -m bench gpu --stages {stage} --out {folder} writes it")
    return file


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = {"figures": {}, "tables": {}, "device": {}}
    return content | (json.loads(file.read_text()) if file.exists() else {})
