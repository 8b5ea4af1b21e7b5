"""Loading and unloading tasks at run time, by the protocol's model repository extension (as Triton has it), for tasks:

    POST /v2/repository/models/{model}/tasks/{task}/load     {"parameters": {"path": "…", "replace": false}}
    POST /v2/repository/models/{model}/tasks/{task}/unload
    GET  /v2/repository/models/{model}/tasks

When a load is answered, all gateways know the task and all replicas have it in memory, unless one takes longer than
half a minute. If a replica cannot load it, the answer says why, and nothing has changed.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from pliant.config.tenants import Right
from pliant.deployments.http.body import read_body
from pliant.deployments.http.openapi import json_body
from pliant.deployments.http.parameters import validated_json
from pliant.deployments.http.validation import named
from pliant.deployments.serving.catalog.confinement import public
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.services import Services
from pliant.deployments.serving.tenants import current
from pliant.deployments.vision.messages import RegisteredTask
from pliant.deployments.vision.task_follower import TaskFollower


class LoadParameters(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A task's folder, whole or below one of the service's roots, as all replicas see it."""
    replace: bool = False
    """May take the place of one of that name."""


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    parameters: LoadParameters


def router(services: Services, tasks: TaskFollower | None, max_body: int) -> APIRouter:
    """The routes over tasks of `services`; `tasks` is None if none has any. `max_body` is in bytes."""
    api = APIRouter(prefix="/v2/repository/models/{model}/tasks", tags=["Tasks"])

    def registry(model: str, right: Right) -> TaskFollower:
        current().check(right, model)
        named(services, ["images"], model)
        if tasks is None:
            raise RequestError(Outcome.UNAVAILABLE, "the registry of tasks is not there")
        return tasks

    @api.get("")
    async def listed(model: str) -> list[dict[str, Any]]:
        return [_card(entry) for entry in registry(model, "infer").of(model)]

    @api.post("/{task}/load", openapi_extra=json_body(LoadRequest))
    async def load(request: Request, model: str, task: str) -> dict[str, Any]:
        known = registry(model, "manage")
        call = validated_json(LoadRequest, await read_body(request, max_body)).parameters
        return _card(await known.load(model, task, call.path, call.replace))

    @api.post("/{task}/unload")
    async def unload(model: str, task: str) -> dict[str, Any]:
        return _card(await registry(model, "manage").unload(model, task))

    return api


def _card(entry: RegisteredTask) -> dict[str, Any]:
    return {
        "name": entry.task.name,
        "model": entry.service,
        "labels": entry.labels,
        "slo_ms": entry.slo_ms,
        "utility": entry.utility,
        "prompts": entry.task.prompts,
        "path": public(entry.task.folder),
        "created": entry.created,
    }
