"""Who sends an HTTP request: asks for keys, holds each tenant to its limits, and says what is left of them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant.deployments.http.places import CONSOLE, PROBES
from pliant.deployments.http.statuses import below_root, error_response
from pliant.deployments.serving.keys import Tenants
from pliant.deployments.serving.logs import REQUEST_ID, work_on
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.tenants import Account, act_for
from pliant.deployments.serving.way import Step, follow, server_timing

_OPEN = (*PROBES, CONSOLE)
"""What needs no key: the console's page has no data in it."""
TIMING = b"x-pliant-timing"
"""A header of requests whose client wants to know what took how long."""
_NO_WORK = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that are not limited."""


class Tenancy:
    """Has the application work for the tenant whose key a request carries, and refuses a request of nobody's."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or below_root(scope) in _OPEN:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").decode("latin-1")
        work_on(headers.get(REQUEST_ID, b"").decode("latin-1"))
        account = self._tenants.of(given)
        if account is None:
            reason = "no valid API key; send one as 'Authorization: Bearer KEY'"
            refusal = error_response(scope, RequestError(Outcome.REJECTED, reason, fault=Fault.UNAUTHORIZED))
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        act_for(account)
        steps = follow() if TIMING in headers and account.may("observe") else None
        await self._limited(account, scope, receive, _with_headers(account, send, steps))

    async def _limited(self, account: Account, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in _NO_WORK:
            await self._app(scope, receive, send)
            return
        try:
            account.begin()
        except RequestError as error:
            await error_response(scope, error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            account.end()


def _with_headers(account: Account, send: Send, steps: Sequence[Step] | None) -> Send:
    """`send`, with the tenant's limits and the `steps` so far in the head of the answer, whose status is counted."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            account.answered(message["status"])
            if limits := account.headers():
                MutableHeaders(scope=message).update(limits)
            if steps:
                MutableHeaders(scope=message)["Server-Timing"] = server_timing(steps)
        await send(message)

    return sent
