"""A text's way through the levels of a cascade: read, go on if a level is not sure, do without those that fail."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import numpy as np

from pliant.deployments.cascade.pruning import Pruned, Read, prune, read_words
from pliant.deployments.cascade.route import Serving, Visit
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.reading import Reading
from pliant.deployments.serving.outcome import BECAUSE, Fault, Outcome, Recorder, RequestError, Trouble, trouble_of
from pliant.policies.cascade.calibration import Floats
from pliant.texts import Text, cut, parts

logger = logging.getLogger("pliant")

_LONG_TEXT = 4_000
"""Characters from which on words are pruned in a thread, so that the event loop stays responsive."""
_MARGIN_S, _MARGIN = 0.005, 0.05
"""What is kept back of the time, in seconds and as a share of the SLO, to answer without a level that is late."""


class CascadeRecorder(Recorder, Protocol):
    """Where a cascade records what happened to a text. Levels are named."""

    def asked(self, level: str) -> None:
        """`level` is to read a text."""

    def begun(self, sure: float) -> None:
        """The first level has read a text that is not past the gate, with that calibrated confidence."""

    def answered(self, level: str, seconds: float, slo_s: float, confidence: float) -> None: ...

    def rerouted(self, level: str, words: int, pruned: int) -> None:
        """From `level` to the next; `pruned` of its `words` were left out, both 0 if the text went on whole."""

    def checked(self, differs: bool) -> None:
        """The last level was asked, too, for a text that was answered without it, and says something else or not."""

    def answers_drifted(self, drifting: bool) -> None:
        """Whether more such answers differ now than in the profile; called when that changes."""

    def drifted(self, level: str, drifting: bool) -> None:
        """Whether `level` now sends on another share of texts than in the profile; called when that changes."""

    def degraded(self, level: str, reason: Trouble) -> None:
        """`level` was to read a text, and could not."""


class CascadeRun:
    """One text on its way. Once `run` has returned, `probabilities` are the answer.

    `degrade` tells whether later levels can be done without; the first one can where there is a fallback.
    """

    def __init__(
        self,
        cascade: str,
        text: Text,
        slo_s: float,
        slack_share: float,
        serving: Serving,
        degrade: bool,
        recorder: CascadeRecorder,
    ) -> None:
        self.warnings: list[str] = []
        self.degraded = False
        self.pruned = 0
        """Words that the last level did not read."""
        self._cascade = cascade
        self._text = text
        self._slo_s = slo_s
        self._slack_share = slack_share
        self._serving = serving
        self._degrade = degrade
        self._recorder = recorder
        self._started = time.monotonic()
        self._route = serving.route
        self._fallback = serving.fallback
        self._past_gate = False
        self._said: list[Floats] = []
        """The calibrated probabilities of the levels that have read the text."""
        self._waited_s = 0.0
        """For replicas of levels that had none: the SLO does not count them."""
        self._interrupted = False
        """A replica failed us, so that the SLO does not count any more."""

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    @property
    def level(self) -> str:
        """The last one that has read the text."""
        return self._route.levels[len(self._said) - 1]

    @property
    def probabilities(self) -> Floats:
        """[labels], what those that have read it vote for."""
        return self._route.policy.vote(self._said)

    @property
    def early(self) -> bool:
        """Whether a level was sure enough before the last one."""
        return not (self.degraded or self._past_gate) and len(self._said) < len(self._route.levels)

    async def run(self) -> None:
        """Have the text read by level after level, until one is sure, or one that can be done without fails.

        Past the gate the last level alone reads it. Raises RequestError where one that is needed fails, and whatever
        else that raises.
        """
        gate = self._serving.gate
        if gate and await gate.lets_past(self._text):
            self._route, self._fallback = gate.route, gate.fallback if self._degrade else None
            self._past_gate = True
        words: Read | None = None
        text, left_out = self._text, 0
        for index, visit in enumerate(self._route.visits):
            within_s = self._within_s(index)
            try:
                reading = await self._read(index, text, within_s)
            except RequestError as error:
                if within_s is None:
                    raise
                await self._do_without(index, error)
                return
            self.pruned = left_out
            if not self._goes_on(visit):
                return
            last = visit.levels[-1]
            alpha = self._route.alphas[last]
            words, pruned = await _prune(self._text, words, reading, alpha, self._route.most_characters(index))
            text, left_out = pruned.text, pruned.pruned
            self._recorder.rerouted(self._route.levels[last], pruned.words, pruned.pruned)

    def _goes_on(self, visit: Visit) -> bool:
        """Whether the text goes on from the last level of `visit`; what became of it at each is taken note of.

        Where it left within the visit, the replica has decided, by the stops that it was given. One past the gate goes
        nowhere, and tells nothing of who sends texts on.
        """
        if self._past_gate:
            return False
        reached = len(self._said) - 1
        for level in range(visit.levels.start, reached + 1):
            if not level:
                self._recorder.begun(float(self._said[0].max()))
            decides = level == visit.levels[-1]
            reroute = self._route.policy.goes_on(self._text, level, self._said[level]) if decides else level < reached
            changed = self._serving.reroutes.observe(self._cascade, level, reroute)
            if changed is not None:
                self._recorder.drifted(self._route.levels[level], changed)
            if level < reached:
                self._recorder.rerouted(self._route.levels[level], 0, 0)
        return reroute

    @property
    def _left_s(self) -> float:
        return self._slo_s + self._waited_s - self.seconds

    def _within_s(self, index: int) -> float | None:
        """How long to wait for a visit, if the answer can do without it; None if it is needed.

        Time is kept back for the answer, and for the level that answers instead of the first one.
        """
        fallback = None if index else self._fallback
        if (index and not self._degrade) or (not index and fallback is None):
            return None
        left_s = max(0.0, self._left_s)
        instead_s = 2 * fallback.latency_s[0] if fallback else 0.0
        return left_s - min(max(_MARGIN_S, _MARGIN * self._slo_s) + instead_s, left_s / 2)

    async def _read(self, index: int, text: Text, within_s: float | None) -> Reading:
        """What visit `index` of the route says; taken note of.

        Raises RequestError; other failures only of a visit that is needed.
        """
        visit, left_s = self._route.visits[index], self._left_s
        level = visit.service
        budget_s = None if self._interrupted else self._route.budget_s(index, left_s)
        self._recorder.asked(level.name)  # though it may be down: one that sleeps is to wake
        try:
            if within_s is not None and level.down:
                raise RequestError(Outcome.UNAVAILABLE, f"{level.name} is down", 1, Fault.DOWN)
            if within_s == 0:
                raise RequestError(Outcome.TOO_LATE, f"no time is left for {level.name}", 1, Fault.SHORT_SLO)
            importance = self._route.importance_request(self._text, visit)
            stops = self._route.stops(self._text, visit)
            reading = await level.read(text, budget_s, self._slack_share, importance, within_s, stops=stops)
            logits = np.stack([*reading.earlier, reading.logits])
            if not np.isfinite(logits).all():
                raise RequestError(Outcome.FAILED, f"{level.name} failed: what it computed of this text are no numbers")
        except RequestError as error:
            raise self._explained(index, left_s, error) from None
        except Exception as error:
            if within_s is None:
                raise
            logger.exception("%s: %s failed; answering without it", self._cascade, level.name)
            raise RequestError(Outcome.FAILED, f"{level.name} failed: {type(error).__name__}; see the log") from error
        self._waited_s += reading.waited_s
        self._interrupted |= reading.interrupted
        if reading.warning and reading.warning not in self.warnings:
            self.warnings.append(reading.warning)
        self._said += [*self._route.policy.calibrated(logits[:, visit.columns], visit.levels.start)]
        return reading

    def _explained(self, index: int, left_s: float, error: RequestError) -> RequestError:
        """`error` of a level, told to somebody who asked the cascade."""
        if not index:
            return error
        level = self._route.visits[index].service.name
        if error.outcome is Outcome.TOO_LATE:
            earlier = " and ".join(before.service.name for before in self._route.visits[:index])
            left = f"{1e3 * max(0.0, left_s):.1f} ms of slo_ms {1e3 * self._slo_s:g}"
            needs = f"{1e3 * self._route.latency_s[index]:.1f} ms on average"
            return _again(
                error,
                f"{earlier} left {left} for {level}, which takes {needs}; {self._cascade} needs it for this text: "
                "retry later, or raise slo_ms",
            )
        return _again(error, f"{error.reason}; {self._cascade} needs it for this text")

    async def _do_without(self, index: int, error: RequestError) -> None:
        """Have the text answered though visit `index` has failed with `error`: by those before, or by the fallback.

        Raises RequestError when the fallback fails, too, or is no better.
        """
        level, reason = self._route.visits[index].service, trouble_of(error)
        fallback = None if index else self._fallback
        if fallback:
            faster = fallback.latency_s[0] < self._route.latency_s[0]
            too_much = error.outcome in (Outcome.SHED, Outcome.TOO_LATE)
            if error.outcome is Outcome.REJECTED or (too_much and not faster):
                raise error
            self._route = fallback
            try:
                await self._read(0, self._text, None)
            except RequestError as failure:
                stands_in = f"it is to answer instead of {level.name}, which {BECAUSE[reason]}"
                raise _again(failure, f"{failure.reason}; {stands_in}") from None
        self._miss(level, reason)

    def _miss(self, level: Classifier, reason: Trouble) -> None:
        self.degraded = True
        self.warnings.append(f"degraded: answered without {level.name}, which {BECAUSE[reason]}")
        self._recorder.degraded(level.name, reason)


async def _prune(
    text: Text, words: Read | None, reading: Reading, alpha: float, most: int
) -> tuple[Read | None, Pruned]:
    """The words of `text`, unless known, if the level told of them; and the text without those that may be left out.

    Characters after the `most` that anybody reads are left out as well, if any are.
    """

    def left() -> tuple[Read | None, Pruned]:
        found = words
        if reading.importance is not None and reading.encoding is not None:
            found = read_words(cut(text, most), reading.encoding, reading.importance)
        return found, prune(found, alpha) if found and alpha else Pruned(text, 0, 0)

    return await asyncio.to_thread(left) if sum(map(len, parts(text))) > _LONG_TEXT else left()


def _again(error: RequestError, reason: str) -> RequestError:
    """`error` for another reason, with the same time to come back."""
    return RequestError(error.outcome, reason, error.retry_after_s, error.fault, error.param)
