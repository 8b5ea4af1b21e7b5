"""What the console shows of cascades: which level answers, what was promised, and whether levels drift."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pliant.deployments.serving.panels import Bars, Flow, Panel, Table

_COLUMNS = ("level", "sure from", "texts read", "sent on", "share sent on", "in the profile", "drift")


def panels(view: Mapping[str, Any]) -> Iterator[Panel]:
    """Of one service; of one that has nothing to serve yet, nothing."""
    levels = view.get("levels", [])
    reroutes = view.get("reroutes", {})
    if not levels:
        return
    gated, begun = (view.get("gate") or {}).get("texts", 0), reroutes.get(levels[0], {}).get("texts", 0)
    past = gated / (begun + gated) if gated else 0.0
    left, answered = 1 - past, {}
    for level in levels:
        texts = reroutes.get(level, {}).get("texts", 0)
        sent_on = reroutes[level]["rerouted"] / texts if texts else 0.0
        answered[level] = left * (1 - sent_on)
        left *= sent_on
    answered[levels[-1]] += past
    yield Flow("Texts through the levels", answered)
    promised = {"accuracy, promised": view["accuracy"]}
    yield Bars(f"Measured on labelled texts (± {view['accuracy_error']:.1%})", promised, unit="%", most=1.0)
    checks = view.get("checks") or {}
    if checks.get("texts"):
        differing = {
            "now": checks["differing"] / checks["texts"],
            "in the profile": checks["profiled_share"],
        }
        yield Bars(f"Early answers that {levels[-1]} gives otherwise, of {checks['texts']}", differing, unit="%")
    rows = [
        (
            level,
            f"{cutoff:.0%}",
            reroutes[level]["texts"],
            reroutes[level]["rerouted"],
            f"{reroutes[level]['rerouted'] / max(1, reroutes[level]['texts']):.1%}",
            f"{reroutes[level]['profiled_share']:.1%}",
            str(reroutes[level]["drift"] or "none"),
        )
        for level, cutoff in zip(levels, view["cutoffs"], strict=False)
        if level in reroutes
    ]
    yield Table("Levels that may send texts on", _COLUMNS, rows)
