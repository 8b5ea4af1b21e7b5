"""The rows of one task beside the paper's tables 2, 3 and 4, §4.2 and §7.3.2."""

from __future__ import annotations

import numpy as np

from pliant.bench.cascade import outcome
from pliant.bench.cascade.figures import ensemble_costs, ensemble_s, said, said_of_ensemble
from pliant.bench.cascade.study import Served, Studied
from pliant.bench.report import Row

_PAPER = {"sst2": "SST-2", "clinc150": "CLINC"}
_TABLE_2 = {
    "sst2": ("95.6 / 96.1 / 95.4", "13.2 / 22.0 / 17.8", "5.8 / 11.6 / 9.4"),
    "clinc150": ("97.0 / 97.3 / 97.0", "14.8 / 21.3 / 17.2", "6.3 / 11.5 / 10.5"),
}
"""Accuracy in %, latency in ms and cost of Tabi, INFaaS and Cocktail."""
_TABLE_3 = {"sst2": "14.2 / 17 / 0.3"}
_TABLE_4 = {"sst2": "95.9 / 38"}
_EARLY = {"sst2": "69.8 / 1.0"}
_AGREEMENT = {"sst2": "89"}


def rows(studied: Studied) -> list[Row]:
    """Ours, and the paper's where it has any."""
    found = [row for served in studied.served for row in _table_2(studied, served)]
    return found + _pruning(studied)


def _table_2(studied: Studied, served: Served) -> list[Row]:
    single = studied.alone[served.single]
    name = f"{_PAPER.get(studied.name, studied.name)}, {100 * served.loss:g}% lost"
    what = f"{name}: ours / INFaaS / Cocktail, "
    accuracies = (
        100 * float(np.mean([one.right.mean() for one in served.outcomes])),
        100 * studied.accuracy(served.single),
        100 * float(served.ensemble_right.mean()),
    )
    voted_ms = 1e3 * float(ensemble_s(studied, served).mean())
    latencies = [*(1e3 * float(np.mean(one.means)) for one in (served.timed, single)), voted_ms]
    costs = [1e-6 * float(np.mean(one)) for one in (served.timed.costs, single.costs, ensemble_costs(studied, served))]
    paper = _TABLE_2.get(studied.name, ("", "", ""))
    return [
        Row(f"{what}accuracy in %", paper[0], _numbers(accuracies)),
        Row(f"{what}latency in ms", paper[1], _numbers(latencies)),
        Row(f"{what}cost (here: MB of weights times s)", paper[2], _numbers(costs)),
        *_early_exit(studied, served, name),
        Row(f"{what}models", "", f"{said(served.cascade)} / {served.single} / {said_of_ensemble(studied, served)}"),
    ]


def _early_exit(studied: Studied, served: Served, name: str) -> list[Row]:
    early = served.early_exit
    if early is None:
        return []
    ours = 1 - float(np.mean(served.timed.means) / np.mean(studied.alone[studied.large].means))
    what = f"{name}: early exit's accuracy / saved of the large model's latency (ours), in %"
    here = f"{100 * early.accuracy:.2f} / {100 * early.saved:.0f} ({100 * ours:.0f})"
    return [Row(what, _TABLE_4.get(studied.name, ""), here)]


def _pruning(studied: Studied) -> list[Row]:
    served, cascade = studied.served[0], studied.served[0].cascade
    name = _PAPER.get(studied.name, studied.name)
    large = studied.test.right(studied.test.whole[studied.large])
    share = float(np.mean([one.early.mean() for one in served.outcomes]))
    gaps = [outcome.early_gap(one.early, large - one.right) for one in served.outcomes]
    found = [
        Row(
            f"{name}: answered early / accuracy gap, in %",
            _EARLY.get(studied.name, ""),
            _percent(share, float(np.mean(gaps))),
        )
    ]
    pruner = cascade.levels[cascade.pruner or 0]
    if agreed := studied.agreements.get(pruner):
        what = f"{name}: words that {pruner} and {studied.large} both find important, in %"
        found.append(Row(what, _AGREEMENT.get(studied.name, ""), _percent(agreed.top_half)))
    for alpha in sorted({0.5, 0.7, 0.9, *cascade.alphas} - {0.0}) if len(cascade.levels) > 1 else []:
        pruned = outcome.pruning(cascade, studied.test, alpha)
        what = f"{name}: words pruned / last level's latency saved (net) / accuracy lost, in %, alpha {alpha:g}"
        here = f"{_percent(pruned.share, pruned.saved)} ({_percent(pruned.saved_net)}) / "
        paper = _TABLE_3.get(studied.name, "") if alpha == 0.7 else ""
        found.append(Row(what, paper, here + _percent(pruned.accuracy_lost)))
    return found


def _numbers(values: list[float] | tuple[float, ...]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _percent(*shares: float) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)
