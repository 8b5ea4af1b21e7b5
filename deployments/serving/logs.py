"""Log lines of gateways, the planner and replicas, each with the `x-request-id` of the request that it is about.

They go where Serve's own go, in the same form, which `logging_config` of cluster.yaml says. Serve knows one request of
a call; but a call of ours carries texts of several, so an id travels with each of them. Plain Python, without Ray.
"""

from __future__ import annotations

import logging
from contextvars import Context, ContextVar
from typing import Final

REQUEST_ID: Final = b"x-request-id"
"""The header, in and out."""
_SERVE_S = "ray.serve"
_request: ContextVar[str] = ContextVar("request", default="")


def start() -> None:
    """Have what this process logs written as Serve writes its own."""
    ours = logging.getLogger("pliant")
    if not any(isinstance(handler, _ToServe) for handler in ours.handlers):
        ours.addHandler(_ToServe())
    ours.setLevel(logging.getLogger(_SERVE_S).getEffectiveLevel())


def work_on(request: str) -> None:
    """From now on this task, and those that it starts, work on the request of this id; empty: on nobody's."""
    _request.set(request)


def worked_on() -> str:
    """The id of the request that is worked on; empty: nobody's."""
    return _request.get()


class _ToServe(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if request := worked_on():
            record.request_id = request
        for handler in logging.getLogger(_SERVE_S).handlers:
            try:
                Context().run(handler.handle, record)  # in a call's context Serve would write that one's id
                handler.flush()  # Serve keeps lines back until there are many: those of its access log
            except OSError:  # on a full disk a line is lost, and nothing else
                self.handleError(record)
