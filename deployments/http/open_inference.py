"""The Open Inference Protocol v2 (KServe, Triton) for texts (`open_inference_texts`) and images.

Of images there is one input, `image` (see `image_tensors.py`). The outputs are `label` (BYTES) and `score` (FP32), both
of shape [n, k], the likeliest label first, `gamma` (INT32) and `fate` (BYTES), both [n, 1].
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from pliant import __version__
from pliant.deployments.http.body import off_loop, read_body
from pliant.deployments.http.image_answers import Image, ImageClassifier, many_labels
from pliant.deployments.http.image_tensors import images
from pliant.deployments.http.open_inference_texts import described, infer_texts, text_metadata
from pliant.deployments.http.openapi import answers, json_body
from pliant.deployments.http.parameters import VisionParameters, validated, validated_json
from pliant.deployments.http.places import hold
from pliant.deployments.http.routes import DirectRoute
from pliant.deployments.http.tensors import (
    HEADER_LENGTH,
    InferRequest,
    OutputTensor,
    requested,
    respond,
    split,
)
from pliant.deployments.http.validation import VERSION, finder, named
from pliant.deployments.serving.services import Answers, Services, not_ready

_IMAGE_OUTPUTS = {"label": "BYTES", "score": "FP32", "gamma": "INT32", "fate": "BYTES"}


def router(services: Services, max_body: int, most: int) -> APIRouter:
    """The protocol's routes over `services`. `max_body` is in bytes, `most` texts or images are in a request."""
    api = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"], route_class=DirectRoute)
    kinds: tuple[Answers, ...] = ("texts", "images")
    find = finder(services, *kinds)

    @api.get("/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @api.get("/health/ready")
    async def ready() -> Response:
        services.check_ready()
        return JSONResponse({"ready": True})

    @api.get("")
    async def server() -> dict[str, Any]:
        return {"name": "pliant", "version": __version__, "extensions": ["binary_tensor_data"]}

    @api.post("/repository/index")
    async def index() -> list[dict[str, str]]:
        """All services, as Triton and KServe list models."""
        listed = []
        for service in services:
            state, reason = ("READY", "") if service.ready else ("UNAVAILABLE", service.state)
            listed.append({"name": service.name, "version": VERSION, "state": state, "reason": reason})
        return listed

    @api.get("/models/{model}/versions/{version}")
    @api.get("/models/{model}")
    async def metadata(model: str, version: str = VERSION) -> dict[str, Any]:
        service = await find(model, version)
        return _image_metadata(service.endpoint) if service.answers == "images" else text_metadata(service.endpoint)

    @api.get("/models/{model}/versions/{version}/ready")
    @api.get("/models/{model}/ready")
    async def model_ready(model: str, version: str = VERSION) -> Response:
        if not (service := named(services, (*kinds, "prompts"), model, version)).ready:
            raise not_ready(service)
        return JSONResponse({"name": model, "ready": True})

    binary = {"type": "string", "format": "binary"}
    schema = json_body(InferRequest, **{"application/octet-stream": binary})
    media = answers("application/json", "application/octet-stream")

    @api.post("/models/{model}/infer", openapi_extra=schema, responses=media)
    async def infer(request: Request, model: str) -> Response:
        return await infer_version(request, model, VERSION)

    @api.post("/models/{model}/versions/{version}/infer", openapi_extra=schema, responses=media)
    async def infer_version(request: Request, model: str, version: str) -> Response:
        service = await find(model, version)
        body = await read_body(request, max_body)
        hold(request.scope, service.name)
        header = request.headers.get(HEADER_LENGTH)
        if service.answers == "images":
            return await _classify_images(service.endpoint, body, header, most)
        return await infer_texts(service.endpoint, body, header, most)

    return api


async def _classify_images(vision: ImageClassifier, body: bytes, header: str | None, most: int) -> Response:
    def parsed() -> tuple[InferRequest, Sequence[Image]]:
        head, tail = split(body, header)
        call = validated_json(InferRequest, head)
        return call, images(call, tail, vision.reader, most)

    call, found = await off_loop(len(body), parsed)
    binary = requested(call, _IMAGE_OUTPUTS)
    predictions = await vision.classify(found, validated(VisionParameters, call.options()))
    tensors = {
        "label": OutputTensor("BYTES", [item.labels for item in predictions]),
        "score": OutputTensor("FP32", [item.scores for item in predictions]),
        "gamma": OutputTensor("INT32", [[item.gamma] for item in predictions]),
        "fate": OutputTensor("BYTES", [[item.fate] for item in predictions]),
    }
    if many_labels(predictions):
        return await asyncio.to_thread(respond, vision.name, call.id, tensors, binary, "")
    return respond(vision.name, call.id, tensors, binary, "")


def _image_metadata(vision: ImageClassifier) -> dict[str, Any]:
    reader, tasks = vision.reader, vision.tasks()
    labels = {f"labels.{entry.task.name}": ",".join(entry.labels) for entry in tasks}
    return {
        "name": vision.name,
        "versions": [VERSION],
        "platform": "pliant_vision",
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, reader.height, reader.width, reader.channels]}],
        "outputs": described(_IMAGE_OUTPUTS),
        "parameters": {"tasks": ",".join(entry.task.name for entry in tasks), **labels},
    }
