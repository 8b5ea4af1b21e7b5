"""How much faster a vision transformer is when each layer merges r tokens (OTAS §III-B; figures 4b and 7).

Weights are random: how fast they are does not depend on what they say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file

from pliant.cache import cache_folder, made_once
from pliant.kernels.vision import executor as vit_executor
from pliant.kernels.vision import profile as vit_profile
from pliant.kernels.vision.executor import VisionExecutor
from pliant.models.vision_info import CONFIG, WEIGHTS, merging_gammas
from pliant.torchvision_ops import declare

declare()
import timm  # noqa: E402


class Case(NamedTuple):
    """A model on a device."""

    name: str
    folder: Path
    batches: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    prepared: bool = False
    """Compiled, or recorded on a GPU; else eager."""

    def executor(self, threads: int) -> VisionExecutor:
        """In memory, with all its gammas prepared if it shall be."""
        most = max(self.batches)
        executor = vit_executor.load(
            self.folder, dtype=self.dtype, device=self.device, threads=threads, most_rows=max(2, most)
        )
        if self.prepared:
            executor.prepare((*merging_gammas(executor.info), 0))
        return executor


class Speeds(NamedTuple):
    """Of one case."""

    backend: str
    seconds: Mapping[int, float]
    """Of a batch at gamma 0, by its size."""
    speedups: Mapping[tuple[int, int], Sequence[float]]
    """By r and batch size: seconds at r = 0 over those at r, one for each block."""


def random_vit(architecture: str) -> Path:
    """A folder with this model of timm's and random weights. Kept in the user's cache."""
    return made_once(cache_folder() / "bench" / f"random-{architecture}", lambda folder: _save(architecture, folder))


def measure(case: Case, threads: int, blocks: int, budget_s: float) -> Speeds:
    """The medians of interleaved runs, in each of so many blocks of `budget_s` seconds."""
    executor = case.executor(threads)
    gammas = (*merging_gammas(executor.info), 0)
    tables = [vit_profile.measure(executor, gammas, case.batches, budget_s=budget_s) for _ in range(blocks)]
    measured = tables[0].batches
    speedups = {
        (-gamma, rows): [table.latency(0, rows) / table.latency(gamma, rows) for table in tables]
        for gamma in gammas
        if gamma
        for rows in measured
    }
    return Speeds(executor.backend, {rows: tables[0].latency(0, rows) for rows in measured}, speedups)


def _save(architecture: str, folder: Path) -> None:
    model = timm.create_model(architecture, pretrained=False)
    image = timm.get_pretrained_cfg(architecture)
    assert image is not None
    size = {"input_size": image.input_size}
    config = {"architecture": architecture, "num_classes": model.num_classes, "pretrained_cfg": size}
    (folder / CONFIG).write_text(json.dumps(config) + "\n")
    save_file(model.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})
