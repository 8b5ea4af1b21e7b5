"""One answer of a language model on its way through the call path: what is left of it, and what is said if it fails."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pliant.deployments.llm.chooser import Prompted, root_name
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving.errand import Errand
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.tenants import in_background
from pliant.deployments.serving.tracing import PROMPT_MS, Attributes

_BACKGROUND_S = 24 * 3600.0
"""How long an answer may stand still for which nobody waits."""


class AnswerErrand(Errand[Prompted, Generation, Piece]):
    """`generation`, answered by `subject`; its first token is wanted within `slo_s` seconds from now.

    With `share_prefixes` tenants share what was computed of prompts. A request weighs what it may come to hold: the
    tokens of its prompt and of the longest answer it asks for.
    """

    def __init__(
        self, generation: Generation, subject: str, slo_s: float, timeout_s: float, share_prefixes: bool = False
    ) -> None:
        super().__init__()
        background = in_background()
        self.subject = subject
        self.timeout_s = _BACKGROUND_S if background else timeout_s
        self._generation = generation._replace(tenant=self.tenant, background=background)
        self._deadline = time.monotonic() + slo_s
        self._slo_s = slo_s
        self._received: list[int] = []
        self._prompt_s: float | None = None
        size = len(generation.prompt) + generation.max_tokens
        adapter, tenant = generation.adapter, None if share_prefixes else self.tenant.name
        self._want = Prompted(size, adapter and adapter.name, None, root_name(adapter, tenant), generation.prompt)

    def want(self, late: bool) -> Prompted:
        return self._want

    def query(self, late: bool) -> Generation:
        within_s = None
        if not (late or self._received or self._generation.background):
            within_s = max(0.0, self._deadline - time.monotonic())
        return self._generation._replace(generated=tuple(self._received), first_token_within_s=within_s)

    def take(self, item: Piece) -> bool:
        self._received += item.tokens
        if item.prompt_s is not None:
            self._prompt_s = item.prompt_s
        return item.finish is not None

    def facts(self, item: Piece) -> Attributes:
        adapter = self._generation.adapter
        known = {} if self._prompt_s is None else {PROMPT_MS: self._prompt_s * 1e3}
        return {
            "gen_ai.request.model": adapter.name if adapter else self.subject,
            "gen_ai.request.max_tokens": self._generation.max_tokens,
            "gen_ai.usage.input_tokens": len(self._generation.prompt),
            "gen_ai.usage.output_tokens": len(self._received),
            **known,
        }

    def waited(self) -> None:
        self._deadline = time.monotonic() + self._slo_s

    def unanswered(self) -> RequestError:
        if not self._received:
            return super().unanswered()
        reason = f"no replica of {self.subject} went on with this answer within {self.timeout_s:g} s"
        return RequestError(Outcome.UNAVAILABLE, reason, 1.0, Fault.TIMED_OUT)

    def explained(self, refusal: Refusal) -> RequestError:
        error = super().explained(refusal)
        if refusal.cause == "unable":
            error.param = "model"
        return error

    def refused(self, refusals: Sequence[Refusal]) -> RequestError:
        able = [refusal for refusal in refusals if refusal.fault is not Fault.ADAPTER_TOO_LARGE]
        return super().refused(able or refusals)
