"""A vision transformer by gamma and batch: what merging saves, and prompt tokens cost (OTAS §III-B, figures 4b, 7)."""

from __future__ import annotations

from dataclasses import asdict

from pliant.bench.gpu import saved
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale
from pliant.kernels.vision import executor as vit_executor
from pliant.kernels.vision import profile as vit_profile
from pliant.models.vision_info import merging_gammas

_MERGED = -13
"""Tokens by layer that the goal is about."""
_PROMPTS = (2, 4, 8)
_BATCHES = (1, 8, 32, 64)


def run(record: Record, scale: Scale) -> None:
    """As it is loaded, and then with the gammas prepared: on a GPU recorded as graphs."""
    batches, budget_s = ((1, 2), 0.1) if scale.dry else (_BATCHES, 20.0)
    loaded = vit_executor.load(
        saved.vision_transformer(scale.dry), dtype=scale.dtype_name, device=scale.device.type, most_rows=max(batches)
    )
    merged = merging_gammas(loaded.info) if scale.dry else (*merging_gammas(loaded.info), _MERGED)
    gammas = (*merged, 0, *_PROMPTS)
    for prepared in (False, True):
        with record.part("prepared" if prepared else "as loaded"):
            if prepared and scale.dry:
                continue  # on a CPU each gamma is compiled for half a minute
            if prepared:
                loaded.prepare(gammas)
            table = vit_profile.measure(loaded, gammas, batches, budget_s=budget_s)
            record.tables[loaded.backend] = asdict(table)
            for gamma in merged:
                for rows in table.batches:
                    speedup = table.latency(0, rows) / table.latency(gamma, rows)
                    record.figures[f"merging_{-gamma}_speedup_{loaded.backend}_b{rows}"] = speedup
