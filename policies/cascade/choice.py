"""Which candidate serves: the fastest that is accurate and quick enough (Tabi §5, online selection).

What a candidate's accuracy was on the split it is chosen on flatters it, as the fastest of many that seem accurate
enough is one that got lucky. So it must meet the target by a margin of standard errors (beyond the paper). Against an
accuracy loss that is the error of the difference to the best single model on the same texts, which is small; an
absolute target is also at the mercy of how hard the texts of the split are.

What a margin is worth was measured with pairs of a 1- and a 6-layer BERT on CLINC150 and SST-2, split 200 times at
random, for losses of 0.3%, 1% and 2%, chosen on 500 to 2,500 texts and checked on all others. They lost more than
promised in 30-55% of the splits without a margin, in 7-21% with 1, in 0.5-12% (5% on average) with 1.65, by more than
0.2% of accuracy in 0-5%, and in 0-7% with 2. With 1.65 the cascades are 3-12% slower than with 1 on CLINC150, 6-21% on
SST-2. With gates, single steps of cut-offs and models of four sizes there are more candidates to be lucky: of three
data sets, 2 missed a loss of 1% in 5-13% of 50 splits, 2.33 in 2-10%, 2.7 in 0-5%; with 2.7 cascades take 5-14% longer
than with 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pliant.policies.cascade.candidates import Candidate

MARGIN = 2.7
"""Standard errors by which a promise must be kept: more than for exits, as the fastest of many candidates serves."""

_NOTICEABLE = 0.02
"""Of a model's mean latency: what a cascade must save to serve instead. Readings of a profile differ by as much."""


class NoCandidateError(ValueError):
    """No candidate meets what is asked."""


def accurate(
    candidates: Sequence[Candidate],
    accuracy_target: float | None = None,
    accuracy_loss: float | None = None,
    margin: float = MARGIN,
) -> list[Candidate]:
    """Those that meet the target by `margin` standard errors, as for `choose`, however slow."""
    spare = _spare(accuracy_target, accuracy_loss, margin)
    return [one for one in candidates if spare(one) >= 0]


def choose(
    candidates: Sequence[Candidate],
    accuracy_target: float | None = None,
    accuracy_loss: float | None = None,
    slo_ms: float | None = None,
    margin: float = MARGIN,
) -> Candidate:
    """The candidate of the least mean latency that meets the target by `margin` standard errors, with p99 in `slo_ms`.

    Either `accuracy_target`, from 0 to 1, or `accuracy_loss`, what the best single model may be above it. That model
    itself loses nothing, so that without `slo_ms` an accuracy loss is always met. A model alone that is hardly slower
    serves instead of a cascade, and of two that are as fast and as accurate the one without a gate. Raises
    NoCandidateError, which says what comes closest, and ValueError unless one of the two is given.
    """
    if not candidates:
        raise NoCandidateError("there are no candidates: profile the cascade first")
    found = accurate(candidates, accuracy_target, accuracy_loss, margin)
    if not found:
        spare = _spare(accuracy_target, accuracy_loss, margin)
        best = max(candidates, key=spare)
        asked = (
            f"accuracy_target {accuracy_target}" if accuracy_target is not None else f"accuracy_loss {accuracy_loss}"
        )
        raise NoCandidateError(
            f"no candidate meets {asked} by {margin:g} standard errors; closest is {best}, {best.accuracy:.2%} ± "
            f"{best.accuracy_error:.2%} accurate: ask for {-spare(best):.2%} less, or profile more labelled texts"
        )
    quick = [one for one in found if slo_ms is None or 1000 * one.p99_latency_s <= slo_ms]
    if not quick:
        quickest = min(found, key=lambda one: one.p99_latency_s)
        raise NoCandidateError(
            f"none of {len(found)} candidates that are accurate enough has its 99th percentile latency within "
            f"slo_ms {slo_ms:g}; closest is {quickest} with {1000 * quickest.p99_latency_s:.1f} ms: raise slo_ms, or "
            "ask for less accuracy"
        )
    hardly_slower_s = min(one.mean_latency_s for one in quick) / (1 - _NOTICEABLE)
    alone = [one for one in quick if len(one.levels) == 1 and one.mean_latency_s <= hardly_slower_s]
    return min(alone or quick, key=lambda one: (one.mean_latency_s, -one.accuracy, one.gate is not None))


def _spare(accuracy_target: float | None, accuracy_loss: float | None, margin: float) -> Callable[[Candidate], float]:
    """By how much a candidate meets the target."""
    if accuracy_target is not None and accuracy_loss is None:
        return lambda one: one.accuracy - margin * one.accuracy_error - accuracy_target
    if accuracy_loss is not None and accuracy_target is None:
        return lambda one: accuracy_loss - one.loss - margin * one.loss_error
    raise ValueError(f"give accuracy_target or accuracy_loss, got {accuracy_target} and {accuracy_loss}")
