"""Whose a request is: what replicas are told of its tenant, and what the gateway lets it do.

The gateway knows for each HTTP request who sent it; whatever is done for it, in this task or in those that it starts,
finds that by `current`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from pliant.config.tenants import ANONYMOUS, OPEN, Right, TenantConfig
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError


class Tenant(NamedTuple):
    """Whose a query is, and its share of a replica compared with others'."""

    name: str = ANONYMOUS
    weight: float = 1.0


@dataclass(eq=False)
class Account:
    """A tenant in one gateway."""

    name: str = ANONYMOUS
    config: TenantConfig = OPEN
    tokens: int = field(default=0, init=False)
    """Of texts, prompts and answers, since the gateway started."""

    @property
    def tenant(self) -> Tenant:
        """For replicas."""
        return Tenant(self.name, self.config.weight)

    def check(self, right: Right, service: str | None = None) -> None:
        """Raise RequestError unless it has `right`, and may use `service`."""
        if right not in self.config.rights:
            reason = f"tenant {self.name} lacks the right {right!r}; it has {', '.join(self.config.rights) or 'none'}"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.FORBIDDEN)
        allowed = self.config.services
        if service is not None and allowed is not None and service not in allowed:
            reason = f"tenant {self.name} may not use {service}; it may use {', '.join(allowed) or 'no service'}"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.FORBIDDEN)


_current: ContextVar[Account] = ContextVar("account")


def current() -> Account:
    """Who sent the HTTP request that is worked on; what the cluster does for itself is nobody's, and may do all."""
    return _current.get(NOBODY)


def act_for(account: Account) -> None:
    """From now on this task, and those that it starts, work for `account`."""
    _current.set(account)


NOBODY = Account()
