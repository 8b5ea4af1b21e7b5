"""The figures of one task: chosen on one split, measured on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np

from pliant.bench.cascade import outcome, resplits
from pliant.bench.cascade.spread import Statistic, over_texts
from pliant.bench.cascade.study import Served, Studied
from pliant.bench.report import Figure, ratio
from pliant.policies.cascade.calibration import Floats, Integers, expected_calibration_error
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.encoder.confidence import confidence, softmax

_COST = "weights' bytes times seconds, of each model the time that it computes"


def figures(studied: Studied) -> list[Figure]:
    """With the task's name behind each: those under the first loss, and a few under each of the others."""
    first, *others = studied.served
    found = _figures(studied, first, f"_{studied.name}", targets=studied.name != "topics")
    for served in others:
        suffix = f"_loss_{served.loss:g}_{studied.name}"
        kept = ("mean_latency_vs_best_single", "accuracy_minus_target", "early_share", "resplits_that_keep_the_promise")
        found += [one for one in _figures(studied, served, suffix, False) if one.name.removesuffix(suffix) in kept]
    return found


def _figures(studied: Studied, served: Served, suffix: str, targets: bool) -> list[Figure]:
    def want(target: str) -> str:
        return target if targets else ""

    return [
        *_latencies(studied, served, suffix, want),
        *_costs(studied, served, suffix),
        *_accuracies(studied, served, suffix, want),
        *_calibration(studied, served.cascade, suffix),
        *_pruning(studied, served.cascade, suffix),
    ]


def _latencies(studied: Studied, served: Served, suffix: str, want: Callable[[str], str]) -> list[Figure]:
    ours, single, large = served.timed, studied.alone[served.single], studied.alone[studied.large]
    oracle = oracle_single(studied, served)
    voted_s = ensemble_s(studied, served)
    beside = f"{1e3 * np.mean(ours.means):.2f} against {1e3 * np.mean(single.means):.2f} ms of {served.single}"

    def against_votes(_: int, rows: Integers) -> float:
        return float(ours.by_text[rows].mean() / voted_s[rows].mean())

    return [
        ratio(
            f"mean_latency_vs_best_single{suffix}",
            ours.means,
            single.means,
            want("<= 0.55"),
            f"{beside}; {said(served.cascade)}",
        ),
        ratio(
            f"mean_latency_vs_best_single_equal_margins{suffix}",
            ours.means,
            studied.alone[served.careful_single].means,
            want("<= 0.6"),
            served.careful_single,
        ),
        ratio(
            f"mean_latency_vs_oracle_single{suffix}",
            ours.means,
            studied.alone[oracle].means,
            "",
            f"{oracle}, the fastest that meets the target on the test split itself",
        ),
        ratio(f"mean_latency_vs_large{suffix}", ours.means, large.means, "", studied.large),
        over_texts(
            f"mean_latency_vs_ensemble{suffix}", against_votes, len(voted_s), beside=said_of_ensemble(studied, served)
        ),
        ratio(f"p99_latency_vs_large{suffix}", ours.p99s, large.p99s, want("<= 1.1")),
    ]


def _costs(studied: Studied, served: Served, suffix: str) -> list[Figure]:
    ours, single = served.timed.costs, studied.alone[served.single].costs
    return [
        ratio(f"cost_vs_best_single{suffix}", ours, single, "", _COST),
        ratio(f"cost_vs_ensemble{suffix}", ours, ensemble_costs(studied, served), "", _COST),
    ]


def _accuracies(studied: Studied, served: Served, suffix: str, want: Callable[[str], str]) -> list[Figure]:
    outcomes, large = served.outcomes, studied.test.right(studied.test.whole[studied.large])
    over = partial(over_texts, texts=len(large), seeds=len(outcomes))

    def met(seed: int, rows: Integers) -> float:
        return float((outcomes[seed].right - large)[rows].mean()) + served.loss

    def share(seed: int, rows: Integers) -> float:
        return float(outcomes[seed].early[rows].mean())

    def gap(seed: int, rows: Integers) -> float:
        return outcome.early_gap(outcomes[seed].early[rows], (large - outcomes[seed].right)[rows])

    target = f"target {studied.accuracy(studied.large) - served.loss:.2%}"
    return [
        over(f"accuracy_minus_target{suffix}", met, target=want(">= 0"), beside=target),
        resplits.figure(
            f"resplits_that_keep_the_promise{suffix}",
            [one for one in studied.resplits if one.loss == served.loss],
            want(">= 0.95"),
        ),
        over(f"early_share{suffix}", share),
        over(f"early_accuracy_gap{suffix}", gap, target=want("<= 0.01"), beside=f"to {studied.large}"),
    ]


def _calibration(studied: Studied, cascade: Candidate, suffix: str) -> list[Figure]:
    """Of the first level."""
    read = studied.test.whole[cascade.levels[0]]
    right = studied.test.right(read)

    def error(temperature: float) -> Statistic:
        sure: Floats = confidence(softmax(read.logits, temperature))
        return lambda _, rows: expected_calibration_error(sure[rows], right[rows])

    after = f"temperature {cascade.temperatures[0]:.2f}"
    return [
        over_texts(f"ece_before{suffix}", error(1.0), len(right), beside=f"of {cascade.levels[0]}"),
        over_texts(f"ece_after{suffix}", error(cascade.temperatures[0]), len(right), beside=after),
    ]


def _pruning(studied: Studied, cascade: Candidate, suffix: str) -> list[Figure]:
    pruned = outcome.pruning(cascade, studied.test, max(cascade.alphas, default=0.0))
    beside = (
        f"{pruned.saved_net:.1%} with what importance and pruning take; {pruned.share:.1%} of words gone, "
        f"{pruned.accuracy_lost:+.2%} of accuracy lost, on {len(pruned.words)} texts that reach the last level"
    )
    found = [
        over_texts(
            f"large_latency_reduction_by_pruning{suffix}",
            lambda _, rows: pruned.of(rows).saved,
            len(pruned.words),
            beside=beside,
        )
    ]
    pruner = cascade.levels[cascade.pruner or 0]
    if agreed := studied.agreements.get(pruner):
        beside = f"rank correlation {agreed.spearman:.2f}; {pruner} and {studied.large}"
        name = f"importance_agreement{suffix}"
        found.append(Figure(name, agreed.top_half, agreed.top_half, agreed.top_half, "", beside))
    return found


def oracle_single(studied: Studied, served: Served) -> str:
    """The fastest model that meets the target on the test split, which nobody knows beforehand."""
    target = studied.accuracy(studied.large) - served.loss
    meets = [name for name in studied.alone if studied.accuracy(name) >= target]
    return min(meets, key=lambda name: float(np.mean(studied.alone[name].means)))


def ensemble_s(studied: Studied, served: Served) -> Floats:
    """What each timed text takes of models that answer in parallel: what the slowest does, [n]."""
    slowest: Floats = np.max([studied.alone[name].by_text for name in served.ensemble.members], axis=0)
    return slowest


def ensemble_costs(studied: Studied, served: Served) -> list[float]:
    """What a text costs all of its models, by pass."""
    costs: list[float] = np.sum([studied.alone[name].costs for name in served.ensemble.members], axis=0).tolist()
    return costs


def said(cascade: Candidate) -> str:
    """For people."""
    if len(cascade.levels) == 1:
        return str(cascade)
    return f"{cascade}, c {cascade.cutoffs[0]:g}, k {cascade.slope:g}, alpha {max(cascade.alphas):g}"


def said_of_ensemble(studied: Studied, served: Served) -> str:
    """For people."""
    ensemble, accuracy = served.ensemble, float(served.ensemble_right.mean())
    missed = "" if accuracy >= studied.accuracy(studied.large) - served.loss else ", misses the target"
    return f"{' + '.join(ensemble.members)} by {ensemble.rule}, {accuracy:.2%}{missed}"


def config(studied: Studied) -> dict[str, object]:
    """What was chosen, and what each model does, for machines."""
    return {
        "texts": studied.sizes,
        "tested_on": len(studied.test.texts),
        "timed_on": len(studied.served[0].timed.by_text),
        "accuracy": {name: studied.accuracy(name) for name in studied.alone},
        "mean_ms": {name: 1e3 * float(np.mean(one.means)) for name, one in studied.alone.items()},
        "chosen": [
            {
                "loss": served.loss,
                "cascade": asdict(served.cascade),
                "single": served.single,
                "ensemble": asdict(served.ensemble),
                "early_exit": asdict(served.early_exit) if served.early_exit else None,
            }
            for served in studied.served
        ],
        "importance_agreement": {
            **{f"{one.pruner}, {one.reader}": one.top_half for one in studied.table.agreements},
            **{f"{level}, {studied.large}": one.top_half for level, one in studied.agreements.items()},
        },
    }
