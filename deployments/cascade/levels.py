"""The levels of a cascade as its profile reads them: classifiers, wherever their runtimes are."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.readings import Level, Seen, UnreadableError
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Report
from pliant.deployments.serving.outcome import Outcome, RequestError, Retry
from pliant.kernels.encoder.texts import Stop
from pliant.texts import Text

_ALWAYS = ImportanceRequest(temperature=1.0, below=math.inf)
_RETRY_S = 1.0
_PATIENCE_S = 120.0
"""How long one text may stay without an answer before the profile is given up."""


class ClassifierReader:
    """Reads through `classifiers` by service, one text after the other.

    A text whose replica dies, is too busy or was not there is read again: its latency would tell nothing. So is one
    that a replica read whose model is not of the service's of `revisions`. Raises the last RequestError when that goes
    on for `patience_s`.
    """

    def __init__(
        self,
        classifiers: Mapping[str, Classifier],
        revisions: Mapping[str, str] = MappingProxyType({}),
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._classifiers = classifiers
        self._revisions = revisions
        self._patience_s = patience_s

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        stops = tuple(Stop(after, 1.0, math.inf) for after in exits)
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                found = await self._classifiers[service].read(
                    text, None, importance_request=_ALWAYS if importance else None, stops=stops
                )
                if other_revision(found.revision, self._revisions.get(service)):
                    reason = f"{service} is answered by {found.revision}, another version of its model"
                    raise RequestError(Outcome.UNAVAILABLE, reason)
            except RequestError as error:
                if error.outcome is Outcome.REJECTED:
                    raise UnreadableError(error.reason) from None
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                if not (found.interrupted or found.waited_s) or time.monotonic() > give_up:
                    assert found.encoding
                    seconds = found.seconds - found.importance_s
                    return Seen(
                        found.logits,
                        found.importance,
                        found.encoding,
                        seconds,
                        found.importance_s,
                        found.compute_s,
                        found.earlier,
                        found.earlier_s,
                    )


class Unrecorded:
    """A classifier's recorder that takes no notes."""

    def arrived(self, tokens: int) -> None: ...

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None: ...

    def shed(self) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...

    def retried(self, why: Retry) -> None: ...


def other_revision(told: str | None, configured: str | None) -> bool:
    """Whether a replica has told of another version of a model than is configured, as far as both are known."""
    return bool(told and configured and told != configured)


def levels_of(
    config: CascadeConfig, encoders: Mapping[str, EncoderConfig], classifiers: Mapping[str, Classifier]
) -> list[Level]:
    """The levels, as the profile wants them described."""
    return [
        Level(
            name,
            tuple(classifiers[at.service].labels),
            config.prune and at.exit is None and encoders[at.service].importance,
        )
        for name, at in zip(config.levels, config.ats, strict=True)
    ]


def run_on(reports: Iterable[Report]) -> list[str]:
    """What the replicas that say so run on: a profile made elsewhere is none of theirs."""
    return sorted({f"{report['backend']} on {report['device']}" for report in reports if report["backend"]})
