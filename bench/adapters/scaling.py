"""Other models, memories, links and loads in the simulator: Figures 17 and 18, and what else might matter (§5.5)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from matplotlib.figure import Figure as Plot

from pliant.bench.adapters import plots
from pliant.bench.adapters.runs import Case, Runs
from pliant.bench.adapters.simulated import LOADS, Scale, Study, p50s, p99s, study, versus
from pliant.bench.adapters.systems import NO_SCHEDULER, NO_SCHEDULER_THERE, OURS, PUBLISHED, S_LORA, System
from pliant.bench.findings import Findings
from pliant.bench.report import Row, median
from pliant.simulation.llm.hardware import A100, FIGURE_4_BYTES_PER_S, LLAMA_7B, LLAMA_13B, LLAMA_30B, Gpu, Model


class _Size(NamedTuple):
    """A model with as many adapters as the paper gives it, and what the paper found on 80 GB."""

    model: Model
    adapters: int
    reduction: float
    throughput: float


_SIZES = (
    _Size(LLAMA_7B, 500, 60.0, 1.86),
    _Size(LLAMA_13B, 100, 61.3, 1.41),
    _Size(LLAMA_30B, 10, 59.3, 1.67),
)
_MEMORIES = {"Llama-7B": (24, 48, 80), "Llama-13B": (48, 80), "Llama-30B": (80,)}
_PAPER_MEMORIES = {("Llama-7B", 24): "1.4", ("Llama-7B", 48): "1.6", ("Llama-7B", 80): "1.9"}


@dataclass(frozen=True)
class Variant:
    """A case that differs from the main one in a single thing; `name` is the suffix of its figures."""

    name: str
    case: Case
    slora: System = S_LORA
    cached: System = NO_SCHEDULER
    """The same with our cache."""


def variants(case: Case, gpu: Gpu | None = None) -> list[Variant]:
    """The link at half and twice its bandwidth, or as slow as Figure 4 has it; lengths as they are in the trace; more
    adapters than fit; with data another popularity; S-LoRA as its code has it, not its policy alone; and a `gpu` that
    was measured, with the paper's adapters for 80 GB."""
    bandwidth = case.costs.link.bytes_per_s
    slow = _with_link(case, FIGURE_4_BYTES_PER_S)
    found = [
        Variant("link_half", _with_link(case, bandwidth / 2)),
        Variant("link_twice", _with_link(case, bandwidth * 2)),
        Variant("link_fig4", slow),
        Variant("full_lengths", replace(case, scale=1.0)),
        Variant("500_adapters", replace(case, adapters=500)),
        Variant("published", case, PUBLISHED, NO_SCHEDULER_THERE),
        Variant("published_link_fig4", slow, PUBLISHED, NO_SCHEDULER_THERE),
    ]
    if case.data:
        found.append(Variant("recorded_popularity", replace(case, recorded=True)))
    if gpu:
        found.append(Variant("gpu", replace(case, costs=replace(case.costs, gpu=gpu), adapters=_SIZES[0].adapters)))
    return found


def sensitivity(runs: Runs, scale: Scale, case: Case, gpu: Gpu | None = None) -> Findings:
    """The main figures once more for each variant, each against its own X."""
    found = Findings()
    for variant in variants(case, gpu):
        name = variant.name
        this, gain = study(runs, scale, variant.case, variant.slora)
        slora, ours = this.at(LOADS["high"], variant.slora, OURS)
        none, cached = this.at(LOADS["medium"], variant.slora, variant.cached)
        found.figures += [
            median(f"load_within_slo_vs_slora_{name}", gain, "", f"X is {statistics.median(this.x):.2f} requests/s"),
            versus(f"p99_ttft_vs_slora_high_{name}", p99s(ours), p99s(slora)),
            versus(f"p50_ttft_vs_slora_high_{name}", p50s(ours), p50s(slora)),
            versus(f"cache_p99_vs_none_{name}", p99s(cached), p99s(none)),
        ]
    return found


def repeat(runs: Runs, scale: Scale, case: Case) -> Findings:
    """Figures 17 and 18, on an A100."""
    found = Findings()
    gains: dict[str, list[float]] = {size.model.name: [] for size in _SIZES}
    relative: dict[str, list[float]] = {load: [] for load in LOADS}
    for size in _SIZES:
        name = size.model.name
        for memory in _MEMORIES[name]:
            costs = replace(case.costs, gpu=A100[memory], model=size.model)
            this, gain = study(runs, scale, replace(case, costs=costs, adapters=size.adapters))
            gains[name].append(statistics.median(gain))
            paper = _PAPER_MEMORIES.get((name, memory), "(plot only)")
            found.rows.append(Row(f"Fig. 18, load within SLO, {name}, {memory} GB", paper, f"{gains[name][-1]:.2f}"))
        what = f"Fig. 17, load within SLO, {name}, 80 GB"
        found.rows.append(Row(what, f"{size.throughput}", f"{gains[name][-1]:.2f}"))
        found.rows.append(_latency(this, size, relative))
    models = [size.model.name for size in _SIZES]
    found.plots["fig17"] = plots.bars(models, relative, "P99 time to first token over S-LoRA's")
    found.plots["fig18"] = _by_memory(gains)
    return found


def _latency(this: Study, size: _Size, relative: dict[str, list[float]]) -> Row:
    """P99 against S-LoRA's at three loads, and the mean of what it loses."""
    for load, factor in LOADS.items():
        slora, ours = this.at(factor, S_LORA, OURS)
        ratios = [mine / theirs for mine, theirs in zip(p99s(ours), p99s(slora), strict=True)]
        relative[load].append(statistics.median(ratios))
    mean = statistics.fmean(relative[load][-1] for load in LOADS)
    name = f"Fig. 17, P99 over all loads, {size.model.name}, 80 GB"
    return Row(name, f"-{size.reduction}%", f"{100 * (mean - 1):+.1f}%")


def _by_memory(gains: Mapping[str, Sequence[float]]) -> Plot:
    """A bar for each memory in which a model fits."""
    memories = _MEMORIES["Llama-7B"]
    heights = {
        name: [dict(zip(_MEMORIES[name], line, strict=True)).get(memory, 0.0) for memory in memories]
        for name, line in gains.items()
    }
    return plots.bars([f"{memory} GB" for memory in memories], heights, "load within SLO over S-LoRA's")


def _with_link(case: Case, bytes_per_s: float) -> Case:
    return replace(case, costs=replace(case.costs, link=replace(case.costs.link, bytes_per_s=bytes_per_s)))
