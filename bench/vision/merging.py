"""Where merging tokens pays, and where not: models, batch sizes, eager and compiled (OTAS figures 4b and 7)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure as Plot

from pliant.bench.findings import Findings
from pliant.bench.report import Options, Row, median
from pliant.bench.vision.merging_speed import Case, Speeds, measure, random_vit
from pliant.models import sources

_TINY, _SMALL, _BASE = (f"vit_{size}_patch16_224" for size in ("tiny", "small", "base"))
_MAIN_BATCH = 8
_BLOCKS = 3
_BUDGET_S = 8.0


def compare(options: Options) -> Findings:
    """The speed of each r over that of r = 0, in all cases; figures are of the first one, in batches of 8."""
    cases = _cuda() if options.device == "cuda" else _cpu(options.quick)
    threads = torch.get_num_threads()
    budget_s = 1.0 if options.quick else _BUDGET_S
    found = {case: measure(case, threads, 1 if options.quick else _BLOCKS, budget_s) for case in cases}
    torch.set_num_threads(threads)
    main, speeds = next(iter(found.items()))
    about = f"{main.name}, {speeds.backend}, batch {_MAIN_BATCH}"
    figures = [
        median(f"merge_speedup_r{r}", ratios, "", about)
        for (r, rows), ratios in sorted(speeds.speedups.items())
        if rows == _MAIN_BATCH
    ]
    rows = [_row(case.name, speeds, batch) for case, speeds in found.items() for batch in speeds.seconds]
    return Findings(figures, rows, {"merging": _plot({case.name: speeds for case, speeds in found.items()})})


def _cpu(quick: bool) -> list[Case]:
    """Compiling a model for a gamma takes half a minute or more, once: quickly, only the digits' is."""
    tiny, batches = random_vit(_TINY), (1, _MAIN_BATCH, 32)
    digits = sources.fetch_vision("zoo/digits-vit")
    eager = [Case(f"{_TINY}, eager", tiny, (1, _MAIN_BATCH)), Case("digits-vit, eager", digits, (1, _MAIN_BATCH, 64))]
    if quick:
        return eager
    return [
        Case(f"{_TINY}, compiled", tiny, batches, prepared=True),
        Case(f"{_TINY}, eager", tiny, batches),
        Case(f"{_SMALL}, eager", random_vit(_SMALL), (_MAIN_BATCH,)),
        Case("digits-vit, compiled", digits, (1, _MAIN_BATCH, 64), prepared=True),
        eager[1],
    ]


def _cuda() -> list[Case]:
    folder, batches = random_vit(_BASE), (1, _MAIN_BATCH, 32, 64)
    return [
        Case(f"{_BASE}, {'recorded' if prepared else 'eager'}", folder, batches, "bfloat16", "cuda", prepared)
        for prepared in (True, False)
    ]


def _row(name: str, speeds: Speeds, batch: int) -> Row:
    ratios = {r: statistics.median(values) for (r, rows), values in speeds.speedups.items() if rows == batch}
    listed = ", ".join(f"r = {r}: {ratio:.2f}" for r, ratio in sorted(ratios.items()))
    here = f"{listed} ({speeds.seconds[batch] * 1e3:.3g} ms at r = 0)"
    return Row(f"speed by r, {name} ({speeds.backend}), batch {batch}", "1.72 at r = 15 (table I)", here)


def _plot(found: Mapping[str, Speeds]) -> Plot:
    """Speed over that at r = 0, by r; a panel for each model (Figure 4b)."""
    plot, panes = plt.subplots(1, len(found), figsize=(4.5 * len(found), 4), squeeze=False, sharey=True)
    for axes, (name, speeds) in zip(panes[0], found.items(), strict=True):
        for batch in speeds.seconds:
            line = {r: statistics.median(values) for (r, rows), values in speeds.speedups.items() if rows == batch}
            axes.plot(sorted(line), [line[r] for r in sorted(line)], marker="o", label=f"batch {batch}")
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set(title=name, xlabel="tokens merged in each layer", ylabel="speed, of that at r = 0")
        axes.legend()
    return plot
