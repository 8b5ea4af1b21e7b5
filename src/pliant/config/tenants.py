"""Who may call: what each tenant of cluster.yaml may do, its share, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pliant.config.base import Milliseconds, ServiceName, Strict

Right = Literal["infer", "manage", "manage-all", "observe"]
"""infer: have services answer. manage: load adapters and tasks, and unload or replace one's own; manage-all: also those
of others. observe: see what services and tenants do."""

RIGHTS: tuple[Right, ...] = ("infer", "manage", "manage-all", "observe")
ANONYMOUS = "anonymous"
"""The tenant of requests without a key."""
UNNAMED = "default"
"""The tenant of keys that come without a name."""


class SloBounds(Strict):
    """What a tenant's requests may say of their time; beyond it, the nearest bound counts."""

    min: Milliseconds | None = None
    max: Milliseconds | None = None

    @model_validator(mode="after")
    def _ordered(self) -> SloBounds:
        if self.min is not None and self.max is not None and self.max < self.min:
            raise ValueError(f"max must be at least min, {self.min:g}")
        return self

    def clamp(self, slo_ms: float) -> float:
        """The nearest to `slo_ms` that is allowed."""
        least = slo_ms if self.min is None else max(slo_ms, self.min)
        return least if self.max is None else min(least, self.max)


class TenantConfig(Strict):
    """One tenant. Limits are for the whole cluster: of several gateways, each enforces its part of them."""

    rights: tuple[Right, ...] = ("infer",)
    services: tuple[ServiceName, ...] | None = None
    """Those that it may use; by default all."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1
    """Its share of a replica that others want, too, compared with theirs."""
    requests_per_minute: Annotated[float, Field(ge=0)] | None = None
    tokens_per_minute: Annotated[float, Field(ge=0)] | None = None
    """Of texts, prompts and answers. Images have none."""
    requests_at_a_time: Annotated[int, Field(ge=1)] | None = None
    """By default three quarters of what the gateways work on at a time, where there is more than one tenant."""
    slo_ms: SloBounds = SloBounds()
    max_utility: Annotated[float, Field(gt=0)] | None = None
    """What its requests may be worth at most; more is taken for this."""


OPEN = TenantConfig(rights=RIGHTS)
"""Of a tenant about which cluster.yaml says nothing: whoever may call, may do all."""
