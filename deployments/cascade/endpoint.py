"""One cascade as the gateway sees it: ask a level, go on if it is not sure, vote (Tabi §4).

Plain asyncio, without Ray. The levels are the classifiers that serve their own clients, too; what the planner has
chosen says how sure is sure enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pliant.config.cascade import CascadeConfig
from pliant.deployments.cascade.checks import Checks
from pliant.deployments.cascade.route import Serving
from pliant.deployments.cascade.run import CascadeRecorder, CascadeRun
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Details, Input, Prediction, TokenIds
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.courier import each
from pliant.deployments.serving.outcome import Outcome, RequestError, counted
from pliant.deployments.serving.scores import likeliest
from pliant.deployments.serving.tenants import current
from pliant.policies.cascade.calibration import Floats
from pliant.texts import Pair, Text

_COME_BACK_S = 5.0


class CascadeClassifier:
    """Answers texts. `services` are those of the levels that `config` names, `entry` is what the planner last said, and
    `asleep` whether a level's service has no replica until it is asked."""

    def __init__(
        self,
        name: str,
        config: CascadeConfig,
        services: Mapping[str, Classifier],
        entry: Callable[[], Chosen | None],
        recorder: CascadeRecorder,
        asleep: Callable[[str], bool] = lambda _service: False,
    ) -> None:
        self.name = name
        self.levels = config.levels
        self.labels = list(services[config.parts()[0]].labels)
        self._config = config
        self._classifiers = {name: services[name] for name in config.parts()}
        self._entry = entry
        self._recorder = recorder
        self._asleep = asleep
        self._serving: Serving | None = None
        self._checks: Checks | None = None

    @property
    def ready(self) -> bool:
        """Whether something is chosen and its levels can be reached: one to begin with where answers may degrade."""
        serving = self.serving
        if serving is None:
            return False
        if self._config.degrade:
            return any(map(self._reached, serving.starts))
        return all(self._reached(visit.service) for visit in serving.route.visits)

    def _reached(self, level: Classifier) -> bool:
        """Whether it answers, at once or once it is awake."""
        return level.ready or self._asleep(level.name)

    @property
    def refused(self) -> bool:
        """Whether nothing serves, nor will before somebody changes what was asked for, or the labelled texts."""
        entry = self._entry()
        return self.serving is None and entry is not None and entry.refused

    @property
    def state(self) -> str:
        """For people: how far it is, or what serves and which of its levels cannot."""
        entry, serving = self._entry(), self.serving
        state = entry.state if entry else f"serves {serving.choice.candidate}" if serving else "waits for the planner"
        return "; ".join([state, *(serving.troubles(self._asleep) if serving else ())])

    @property
    def reads_pairs(self) -> bool:
        """Whether it was profiled on pairs of texts; else it reads single ones."""
        return self.serving is not None and self.serving.choice.pairs

    @property
    def serving(self) -> Serving | None:
        """The latest that was chosen; what comes after it, a new planner that has not chosen yet, does not undo it."""
        entry = self._entry()
        choice = entry.choice if entry else None
        if choice is not None and (self._serving is None or self._serving.choice != choice):
            before = self._serving.reroutes.levels if self._serving else ()
            self._serving = serving = Serving(choice, self._classifiers, self.labels, self._config.seed)
            self._checks = Checks(
                self.name, choice, serving.last, self._config.check, self._config.slo_ms / 1e3, self._recorder
            )
            self._recorder.answers_drifted(False)
            for level in sorted({*before, *self._serving.reroutes.levels}):
                self._recorder.drifted(level, False)
        return self._serving

    async def classify(self, texts: Sequence[Input], parameters: ClassifyParameters) -> list[Prediction]:
        """Answer all `texts`, or raise the RequestError of the first that fails."""
        whole = [text for text in texts if not isinstance(text, TokenIds)]
        if len(whole) < len(texts):
            reason = f"{self.name} is a cascade, which reads no token ids; ask one of {', '.join(self._classifiers)}"
            raise RequestError(Outcome.REJECTED, reason)
        if parameters.candidate_labels is not None:
            reason = f"parameters.candidate_labels: {self.name} is a cascade, which knows its own labels alone"
            raise RequestError(Outcome.REJECTED, reason)
        if parameters.function_to_apply == "sigmoid":
            raise RequestError(
                Outcome.REJECTED,
                f"parameters.function_to_apply: got 'sigmoid'; {self.name} is a cascade, whose levels vote with "
                "probabilities; allowed: softmax, or none for their logarithms",
            )
        return await each([self._classify(text, parameters) for text in whole])

    async def _classify(self, text: Text, parameters: ClassifyParameters) -> Prediction:
        serving = self.serving
        account = current()
        slo_s = account.slo_ms(parameters.slo_ms or self._config.slo_ms) / 1e3
        slack_share = account.utility(parameters.utility)
        with counted(self._recorder) as ending:
            if serving is None:
                raise RequestError(Outcome.UNAVAILABLE, f"{self.name} is not ready yet: {self.state}", _COME_BACK_S)
            if isinstance(text, Pair) != serving.choice.pairs:
                reads, other = ("pairs of texts", "single texts") if serving.choice.pairs else ("single texts", "pairs")
                reason = (
                    f"{self.name} was profiled on {reads}, and answers no {other}; "
                    f"ask one of {', '.join(self._classifiers)}"
                )
                raise RequestError(Outcome.REJECTED, reason)
            run = CascadeRun(self.name, text, slo_s, slack_share, serving, self._config.degrade, self._recorder)
            await run.run()
            if run.degraded:
                ending.outcome = Outcome.DEGRADED
            probabilities = run.probabilities
        if run.early and self._checks:
            self._checks.look(text, int(probabilities.argmax()))
        order = likeliest(probabilities, parameters.top_k)
        sure = float(probabilities.max())
        self._recorder.answered(run.level, run.seconds, slo_s, sure)
        warnings = run.warnings
        if serving.choice.unmet:
            warnings.append(f"{self.name} does not keep what it should; see /stats")
        return Prediction(
            [self.labels[index] for index in order],
            _scores(probabilities, parameters)[order].tolist(),
            "; ".join(warnings) or None,
            Details(run.level, sure, run.pruned, run.degraded),
        )

    def facts(self) -> dict[str, Any]:
        """For people and Prometheus."""
        entry, serving = self._entry(), self.serving
        facts: dict[str, Any] = {"state": self.state, "ready": self.ready, "problem": entry.problem if entry else None}
        if serving and self._checks:
            choice, candidate = serving.choice, serving.choice.candidate
            drifts = [f"{self.name}: at {drift}" for drift in serving.reroutes.drifts()]
            if differing := self._checks.drift():
                drifts.append(f"{self.name}: {differing}")
            facts |= {
                "levels": candidate.levels,
                "cutoffs": candidate.cutoffs,
                "alphas": candidate.alphas,
                "gate": serving.gate and serving.gate.facts(),
                "accuracy": candidate.accuracy,
                "accuracy_error": candidate.accuracy_error,
                "mean_latency_s": candidate.mean_latency_s,
                "unmet": choice.unmet,
                "fallback": choice.fallback and str(choice.fallback),
                "conformal": choice.conformal,
                "reroutes": serving.reroutes.facts(),
                "checks": self._checks.facts(),
                "warnings": drifts,
            }
        return facts


def _scores(probabilities: Floats, parameters: ClassifyParameters) -> Floats:
    """As asked for: probabilities, or logits that softmax turns into them."""
    if parameters.function_to_apply != "none":
        return probabilities
    scores: Floats = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    return scores
