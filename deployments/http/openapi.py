"""The OpenAPI document: what FastAPI finds by itself, and beside it bodies and all the ways in which a request may end.

Bodies are read by the routes themselves, within limits, so FastAPI does not know them; errors have their protocol's
shape and statuses (`statuses`), which it does not know either.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from pliant.deployments.http.statuses import BUSY, OPENAI, STATUSES, speaks_openai
from pliant.deployments.serving.outcome import Fault, Outcome

Json = dict[str, Any]

_REF = "#/components/schemas/"
_OF_BODIES: Collection[Outcome | Fault] = (
    Fault.CONTEXT_LENGTH,
    Fault.UNKNOWN_PARAMETER,
    Fault.MISSING_PARAMETER,
    Fault.SLOW_BODY,
    Fault.TOO_LARGE,
    Fault.MEDIA_TYPE,
    Fault.TOO_LONG,
    Fault.SHORT_SLO,
    Outcome.TOO_LATE,
)
"""What only requests with a body may end with."""
_REASON: Json = {"type": "string", "description": "What was wrong, and what is allowed."}
_OPENAI_ERROR = {
    "message": _REASON,
    "type": {"type": "string"},
    "param": {"type": ["string", "null"], "description": "The part of the request that is wrong."},
    "code": {"type": ["string", "null"]},
}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": [*properties]}


_ERRORS = {"Error": _object(error=_REASON), "OpenAIError": _object(error=_object(**_OPENAI_ERROR))}
"""By name: that of the Open Inference Protocol, Hugging Face's and our own pages; and OpenAI's."""


def json_body(*models: type[BaseModel], **others: Json) -> Json:
    """What OpenAPI says of a route whose body is one of `models` in JSON, or of another type of `others`."""
    found = [_schema(model) for model in models]
    schema = found[0] if len(found) == 1 else {"anyOf": found}
    content = {"application/json": {"schema": schema}, **{media: {"schema": other} for media, other in others.items()}}
    return {"requestBody": {"required": True, "content": content}}


@functools.cache
def _schema(model: type[BaseModel]) -> Json:
    """Made once: it takes milliseconds, and routes share it."""
    return model.model_json_schema(ref_template=f"{_REF}{{model}}")


def answers(*media: str) -> dict[int | str, Json]:
    """What OpenAPI says of a route that answers in one of these types."""
    return {200: {"description": "The answer.", "content": {each: {} for each in media}}}


def document(app: FastAPI, open_paths: Collection[str] | None) -> Callable[[], Json]:
    """Makes the document of `app`, once. With `open_paths`, all others ask for an API key."""

    def made() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _made(app, open_paths)
        return app.openapi_schema

    return made


def _made(app: FastAPI, open_paths: Collection[str] | None) -> Json:
    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = dict(_ERRORS)
    for path, operations in page["paths"].items():
        for operation in operations.values():
            body = operation.get("requestBody")
            _gather(body, schemas)
            good = {status: each for status, each in operation["responses"].items() if status.startswith("2")}
            operation["responses"] = good | _failures(speaks_openai({"path": path}), body is not None)
            if open_paths is not None and path not in open_paths:
                operation["security"] = [{"key": []}]
    page["components"] = {"schemas": schemas}
    if open_paths is not None:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return page


def _gather(part: Any, schemas: Json) -> None:
    """Move what schemas within `part` define to where all references look for it."""
    if isinstance(part, dict):
        schemas |= part.pop("$defs", {})
    inner: Iterable[Any] = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for each in inner:
        _gather(each, schemas)


def _failures(openai: bool, has_body: bool) -> Json:
    """The statuses of an operation's protocol, with the shape of its errors."""
    table: Mapping[Outcome | Fault, int] = {row: of.status for row, of in OPENAI.items()} if openai else STATUSES
    why: dict[int, list[str]] = defaultdict(list)
    for row, status in table.items():
        if has_body or row not in _OF_BODIES:
            why[status].append(row.replace("_", " "))
    schema = {"$ref": f"{_REF}{'OpenAIError' if openai else 'Error'}"}
    wait = {"headers": {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}}
    return {
        str(status): {
            "description": ", ".join(reasons),
            "content": {"application/json": {"schema": schema}},
            **(wait if status in (BUSY, 503, 504) else {}),
        }
        for status, reasons in sorted(why.items())
    }
