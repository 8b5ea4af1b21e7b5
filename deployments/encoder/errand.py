"""One text on its way through the call path: how long it is, and how much of its time is left."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from pliant.config.tenants import ANONYMOUS
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Query
from pliant.deployments.serving.errand import Errand
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.table import NoTimeError
from pliant.deployments.serving.tracing import COMPUTE_MS, Attributes
from pliant.kernels.encoder.texts import Stop


class TextWant(NamedTuple):
    """What `EncoderChooser` needs to know of a text."""

    length: int
    """In tokens."""
    budget_s: float | None
    """Seconds left until the SLO; None once it must be answered however late."""
    slack_share: float
    """Share of its slack that it may spend waiting, 0 to 1."""
    importance: bool = False
    """Whether the importance of its tokens may be told, too."""
    tenant: str = ANONYMOUS


class TextErrand(Errand[TextWant, Query, Answer]):
    """A text of `length` tokens, which `service` should answer within `slo_s` seconds of `started`; None: however late.

    `ids` are its tokens, `types` and `stops` what `Query` says. A caller that can do without an answer waits for no
    replicas.
    """

    def __init__(
        self,
        service: str,
        ids: bytes,
        length: int,
        started: float,
        slo_s: float | None,
        slack_share: float,
        importance_request: ImportanceRequest | None,
        timeout_s: float,
        waits: bool,
        types: bytes = b"",
        stops: tuple[Stop, ...] = (),
    ) -> None:
        super().__init__()
        self.subject = service
        self.timeout_s = timeout_s
        self.waits = waits
        self.waited_s = 0.0
        """Until there was a replica for it, the last time that there was none: they do not count towards its SLO."""
        self._ids = ids
        self._types = types
        self._stops = stops
        self._length = length
        self._started = started
        self._slo_s = slo_s
        self._slack_share = slack_share
        self._importance_request = importance_request

    def want(self, late: bool) -> TextWant:
        return TextWant(
            self._length,
            self._budget_s(late),
            self._slack_share,
            self._importance_request is not None,
            self.tenant.name,
        )

    def query(self, late: bool) -> Query:
        return Query(
            self._ids,
            self._length,
            self._budget_s(late),
            self._slack_share,
            self._importance_request,
            self.tenant,
            self._types,
            self._stops,
        )

    def facts(self, item: Answer) -> Attributes:
        return {
            "pliant.tokens": self._length,
            "pliant.runtime": item.max_length,
            "pliant.computed_tokens": item.computed,
            COMPUTE_MS: item.seconds * 1e3,
        }

    def waited(self) -> None:
        """It gets its time once more, so that the queue behind a replica that comes back is no longer than usual."""
        self.waited_s = time.monotonic() - self._started

    def no_time(self, error: NoTimeError) -> RequestError:
        if self._slo_s is not None and error.service_s > self._slo_s:
            takes = f"this text takes about {error.service_s * 1e3:.1f} ms"
            reason = f"{self.subject} cannot meet this slo_ms even when idle: {takes}; raise it"
            return RequestError(Outcome.TOO_LATE, reason, 1.0, Fault.SHORT_SLO)
        return self._busy(error.service_s if math.isinf(error.retry_after_s) else error.retry_after_s)

    def refused(self, refusals: Sequence[Refusal]) -> RequestError:
        return self._busy(min(refusal.retry_after_s or 0.0 for refusal in refusals))

    def unserved(self) -> RequestError:
        reason = f"no replica of {self.subject} takes {self._length} tokens now"
        return RequestError(Outcome.UNAVAILABLE, reason, 1.0, Fault.DOWN)

    def _busy(self, retry_after_s: float) -> RequestError:
        reason = f"{self.subject} is too busy to meet the SLO: retry later, raise slo_ms, or send fewer texts at once"
        return RequestError(Outcome.SHED, reason, retry_after_s)

    def _budget_s(self, late: bool) -> float | None:
        return None if late or self._slo_s is None else self._started + self.waited_s + self._slo_s - time.monotonic()
