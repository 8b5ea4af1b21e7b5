"""32 requests at once: the engine against whatever else answers them, lengths alike and not (Flover §VI-B, D)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pliant.bench.findings import Findings, Outcomes, interleaved, speedup
from pliant.bench.llm.systems import System
from pliant.bench.llm.workload import Workload
from pliant.bench.report import Row

OURS = "ours"
UNCOMPACTED = "ours, not compacted"
INSTANCES = "32 threads of generate"
OWN_INSTANCES = "32 threads over our kernels"
ONE_BY_ONE = "generate one by one"
STATIC = "generate, padded batch"
OWN_STATIC = "padded batch over our kernels"
CONTINUOUS = "transformers continuous"

RUNS = 7 + 7
"""Of systems, on one length and on lengths that range, for each repetition."""
_BESIDES = {
    ONE_BY_ONE: "one_by_one",
    STATIC: "static_batch",
    OWN_STATIC: "own_static_batch",
    OWN_INSTANCES: "own_instances",
}
"""Systems without a target, and what their figures are called."""


def compare(
    systems: Mapping[str, System],
    alike: Workload,
    ranging: Workload,
    repetitions: int,
    done: Callable[[], object],
    suffix: str = "",
) -> Findings:
    """All on answers of one length, then on lengths that range; `suffix` ends the names of the figures."""
    targets = not suffix
    found = Findings()
    uniform = interleaved({name: systems[name] for name in systems if name != UNCOMPACTED}, alike, repetitions, done)
    varied = interleaved({name: systems[name] for name in systems if name != ONE_BY_ONE}, ranging, repetitions, done)
    for label, outcomes in (("", uniform), ("_nonuniform", varied)):
        for system, name in _BESIDES.items():
            if system in outcomes:
                found.figures.append(speedup(f"speedup_vs_{name}{label}{suffix}", outcomes[OURS], outcomes[system]))
    found.figures += [
        speedup(f"speedup_vs_instances_32{suffix}", uniform[OURS], uniform[INSTANCES], ">= 15" if targets else ""),
        speedup(
            f"speedup_vs_instances_nonuniform{suffix}", varied[OURS], varied[INSTANCES], ">= 18" if targets else ""
        ),
        speedup(
            f"speedup_vs_transformers_continuous{suffix}",
            varied[OURS],
            varied[CONTINUOUS],
            ">= 3" if targets else "",
        ),
        speedup(f"shuffle_gain{suffix}", varied[OURS], varied[UNCOMPACTED], ">= 1.2" if targets else ""),
    ]
    if targets:
        found.rows += _table_1(uniform)
    return found


def _table_1(outcomes: Outcomes) -> list[Row]:
    """Table I: threads that drive the model, and launches of the model for one token of each request."""
    ours, theirs = outcomes[OURS][0], outcomes[OWN_INSTANCES][0]
    requests = len(ours.arrivals)
    launches = [outcome.passes / outcome.tokens * requests for outcome in (ours, theirs)]
    saved = [1 - ours.threads / theirs.threads, 1 - launches[0] / launches[1]]
    return [
        Row("Table I: threads, instances / fused", "32 (+1) / 1 (+1)", f"{theirs.threads} (+1) / {ours.threads} (+1)"),
        Row("Table I: launches for a token of each request", "32 / 1", f"{launches[1]:.3g} / {launches[0]:.3g}"),
        Row("§I: threads and launches saved", "93.9% and 96.9%", f"{saved[0]:.1%} and {saved[1]:.1%}"),
    ]
