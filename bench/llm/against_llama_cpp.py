"""Against llama.cpp, on the same bfloat16 weights: many requests at once, and one alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pliant.bench.findings import Findings, best, interleaved, speedup
from pliant.bench.llm.llama_cpp import LlamaCpp
from pliant.bench.llm.saturated import OURS
from pliant.bench.llm.systems import System
from pliant.bench.llm.workload import Workload

_SETTINGS = {"llama.cpp, flash attention": True, "llama.cpp": False}
RUNS = 2 * (1 + len(_SETTINGS))
"""How many there are for each repetition."""


def compare(
    ours: System,
    model: Path,
    threads: int,
    max_length: int,
    together: Workload,
    repetitions: int,
    done: Callable[[], object],
) -> Findings:
    """The engine against the better of llama.cpp's two attentions, on `together`, and on its first request alone."""
    theirs = {
        name: LlamaCpp(model, threads, len(together), max_length, flash=flash) for name, flash in _SETTINGS.items()
    }
    found = Findings()
    try:
        for workload, count, target in ((together, len(together), ">= 1.4"), (together[:1], 1, ">= 0.9")):
            for system in theirs.values():
                system.run(together[:1])
            outcomes = interleaved({OURS: ours, **theirs}, workload, repetitions, done)
            quickest = best(outcomes, theirs)
            found.figures.append(speedup(f"speedup_vs_llamacpp_{count}", outcomes[OURS], outcomes[quickest], target))
    finally:
        for system in theirs.values():
            system.close()
    return found
