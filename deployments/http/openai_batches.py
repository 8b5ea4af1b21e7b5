"""OpenAI's /v1/files and /v1/batches: files of requests, answered in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError

from pliant.deployments.http.body import check_json, off_loop, read_body
from pliant.deployments.http.form import fields
from pliant.deployments.http.openai_body import Body, Neutral
from pliant.deployments.http.openai_schemas import parsed
from pliant.deployments.http.openapi import answers, json_body
from pliant.deployments.serving.batches.runner import Runner
from pliant.deployments.serving.batches.store import BatchStore, File, Progress, lines_of
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.tenants import current

P = ParamSpec("P")
T = TypeVar("T")
Json = dict[str, Any]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]

_MOST_LINES = 50_000
_MOST_LISTED = 100
_RETRY_S = 5.0
_STORED_WITHIN_S = 30.0
_ENDED = {"completed": "completed_at", "failed": "failed_at", "expired": "expired_at", "cancelled": "cancelled_at"}
"""What OpenAI calls the time at which a batch ended, by how."""


class BatchRequest(Body):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[Any, Neutral()] = None


class Line(Body):
    """A line of a file of requests."""

    custom_id: Annotated[str, Field(max_length=512)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


_FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
    "required": ["file", "purpose"],
}


def router(runner: Runner, max_body: int) -> APIRouter:
    """The routes over what `runner` works on; a file has at most `max_body` bytes."""
    store = runner.store
    api = APIRouter(prefix="/v1", tags=["OpenAI"])
    media = answers("application/json")
    form = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}

    @api.post("/files", openapi_extra=form, responses=media)
    async def upload(request: Request) -> Response:
        owner = _owner()
        body = await read_body(request, max_body)
        parts = await asyncio.to_thread(fields, request.headers.get("content-type", ""), body)
        for name in ("file", "purpose"):
            if name not in parts:
                reason = f"{name}: missing; it must be given"
                raise RequestError(Outcome.REJECTED, reason, fault=Fault.MISSING_PARAMETER, param=name)
        purpose = parts["purpose"].content.decode(errors="replace")
        if purpose != "batch":
            raise RequestError(Outcome.REJECTED, f"purpose: got {purpose[:60]!r}; must be batch", param="purpose")
        given = parts["file"]
        await asyncio.to_thread(_check, given.content)
        file = await _stored(store, store.add_file, owner, given.filename or "file", purpose, given.content)
        return JSONResponse(_file(file))

    @api.get("/files", responses=media)
    async def files(after: str | None = None, limit: int = _MOST_LISTED, purpose: str | None = None) -> Json:
        found = await _stored(store, store.files, _owner())
        return _listed([_file(file) for file in found if purpose in (None, file.purpose)], after, limit)

    @api.get("/files/{file_id}", responses=media)
    async def file(file_id: str) -> Json:
        return _file(await _stored(store, store.file, _owner(), file_id))

    @api.get("/files/{file_id}/content", responses=answers("application/octet-stream"))
    async def content(file_id: str) -> Response:
        found = await _stored(store, store.content, _owner(), file_id)
        return Response(found, media_type="application/octet-stream")

    @api.delete("/files/{file_id}", responses=media)
    async def delete(file_id: str) -> Json:
        await _stored(store, store.delete_file, _owner(), file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @api.post("/batches", openapi_extra=json_body(BatchRequest), responses=media)
    async def create(request: Request) -> Response:
        owner = _owner()
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(BatchRequest, body))
        content = await _stored(store, store.content, owner, call.input_file_id)
        total = await asyncio.to_thread(_check, content, call.endpoint)
        batch = await _stored(store, store.add_batch, owner, call.endpoint, call.input_file_id, total, call.metadata)
        runner.wake()
        return JSONResponse(_batch(batch))

    @api.get("/batches", responses=media)
    async def batches(after: str | None = None, limit: int = 20) -> Json:
        found = await _stored(store, store.batches, _owner())
        return _listed([_batch(each) for each in found], after, limit)

    @api.get("/batches/{batch_id}", responses=media)
    async def batch(batch_id: str) -> Json:
        return _batch(await _stored(store, store.batch, _owner(), batch_id))

    @api.post("/batches/{batch_id}/cancel", responses=media)
    async def cancel(batch_id: str) -> Json:
        found = await _stored(store, store.batch, _owner(), batch_id)
        if found.finished:
            reason = f"batch_id: {batch_id} is {found.status}; only one that has not ended can be cancelled"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.CONFLICT, param="batch_id")
        await _stored(store, store.cancel, found.batch)
        runner.wake()
        return _batch(await _stored(store, store.batch, _owner(), batch_id))

    return api


async def _stored(store: BatchStore, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a method of `store` answers. Raises RequestError also when it cannot be used."""
    try:
        async with asyncio.timeout(_STORED_WITHIN_S):
            return await store.in_thread(method, *args, **kwargs)
    except OSError as error:
        reason = f"files and batches cannot be read or written now: {error.strerror or 'the state does not answer'}"
        raise RequestError(Outcome.UNAVAILABLE, reason, _RETRY_S) from error


def _owner() -> str:
    """The tenant that asks, who must be allowed to have services answer."""
    account = current()
    account.check("infer")
    return account.name


def _check(content: bytes, endpoint: str | None = None) -> int:
    """How many requests there are in a file, all of them of `endpoint`. Raises RequestError that names the line."""
    names: set[str] = set()
    for number, line in enumerate(lines_of(content), 1):
        if number > _MOST_LINES:
            reason = f"file: has more than {_MOST_LINES} requests; send several files"
            raise RequestError(Outcome.REJECTED, reason, param="file")
        if wrong := _wrong(line, endpoint, names):
            raise RequestError(Outcome.REJECTED, f"file: request {number}: {wrong}", param="file")
    if not names:
        raise RequestError(Outcome.REJECTED, "file: has no requests; send one JSON object a line", param="file")
    return len(names)


def _wrong(line: bytes, endpoint: str | None, names: set[str]) -> str | None:
    """What is wrong with a request; its name joins those that were seen."""
    try:
        check_json(line)
        found = Line.model_validate_json(line)
    except RequestError as error:
        return error.reason
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'line'}: {problem['msg']}"
    if found.custom_id in names:
        return f"custom_id: {found.custom_id!r} comes twice"
    names.add(found.custom_id)
    if endpoint is not None and found.url != endpoint:
        return f"url: got {found.url}; the batch is for {endpoint}"
    if found.body.get("stream"):
        return "body.stream: not in a batch; leave it out"
    return None


def _listed(found: Sequence[Json], after: str | None, limit: int) -> Json:
    """A page of `found`, behind the one whose id is `after`."""
    if not 1 <= limit <= _MOST_LISTED:
        raise RequestError(Outcome.REJECTED, f"limit: got {limit}; must be 1 to {_MOST_LISTED}", param="limit")
    ids = [each["id"] for each in found]
    begin = ids.index(after) + 1 if after in ids else 0
    page = found[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(found),
    }


def _file(file: File) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _batch(progress: Progress) -> Json:
    batch, end = progress.batch, progress.finished
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": progress.status,
        "output_file_id": end.output_file_id if end else None,
        "error_file_id": end.error_file_id if end else None,
        "created_at": batch.created_at,
        "in_progress_at": batch.created_at,
        "expires_at": batch.expires_at,
        **({_ENDED[end.status]: end.at} if end else {}),
        "request_counts": {
            "total": batch.total,
            "completed": progress.completed,
            "failed": progress.failed,
        },
        "metadata": batch.metadata,
    }
