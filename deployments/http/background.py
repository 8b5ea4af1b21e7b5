"""Requests that the gateway sends to itself, in the background: as any client's, but for places and limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from starlette.types import Message, Scope

from pliant.deployments.http.failures import answer_failures, fault_of
from pliant.deployments.http.statuses import error_response
from pliant.deployments.http.tracing import trace_requests
from pliant.deployments.serving.batches.runner import Reply
from pliant.deployments.serving.keys import Tenants
from pliant.deployments.serving.logs import REQUEST_ID, work_on
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.tenants import act_for

logger = logging.getLogger("pliant")


class Background:
    """Sends requests to `routers` for one of `tenants`."""

    def __init__(self, routers: Sequence[APIRouter], tenants: Tenants) -> None:
        self._tenants = tenants
        self._app = FastAPI(openapi_url=None)
        for router in routers:
            self._app.include_router(router)
        trace_requests(self._app)
        answer_failures(self._app)

    async def ask(self, tenant: str, name: str, path: str, body: Mapping[str, Any]) -> Reply:
        """What a POST to `path` is answered with. The same `name` draws the same answer.

        Raises ValueError if the answer is no JSON.
        """
        account = self._tenants.accounts.get(tenant)
        if account is None:
            reason = f"there is no tenant {tenant} any more"
            error = RequestError(Outcome.REJECTED, reason, fault=Fault.FORBIDDEN)
            return _read(error_response({"path": path}, error))
        act_for(account, background=True)
        work_on(name)
        sent: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        status, content = 500, b""

        async def receive() -> Message:
            return sent.pop() if sent else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, content
            status = message.get("status", status)
            content += message.get("body", b"")

        headers = [(REQUEST_ID, name.encode()), (b"content-type", b"application/json")]
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("batches: a request to %s failed", path)
        return Reply(status, json.loads(content), fault_of(scope) is Fault.SHORT_SLO)


def _read(response: Response) -> Reply:
    return Reply(response.status_code, json.loads(bytes(response.body)))
