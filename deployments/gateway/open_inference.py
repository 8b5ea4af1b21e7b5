"""The Open Inference Protocol v2 (KServe, Triton) for classifiers: JSON, and its binary tensor extension.

A classifier takes one input, `text` (BYTES, shape [n] or [n, 1]), and gives `label` (BYTES) and `score` (FP32), both of
shape [n, k], the likeliest label first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from pliant import __version__
from pliant.deployments.gateway.body import read_body
from pliant.deployments.gateway.classifier import Classifier, Prediction
from pliant.deployments.gateway.errors import RequestError
from pliant.deployments.gateway.parameters import ClassifyParameters, validated, validated_json
from pliant.deployments.gateway.validation import VERSION, bounded, finder

_HEADER_LENGTH = "Inference-Header-Content-Length"
_OUTPUTS = {"label": "BYTES", "score": "FP32"}


class InputTensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class RequestedOutput(BaseModel):
    name: str
    parameters: dict[str, Any] = {}


class InferRequest(BaseModel):
    """The JSON part of an inference request."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    parameters: dict[str, Any] = {}
    inputs: list[InputTensor]
    outputs: list[RequestedOutput] | None = None


class Model(Protocol):
    """Whatever clients may ask to be ready."""

    @property
    def ready(self) -> bool: ...


def router(
    classifiers: Mapping[str, Classifier], others: Mapping[str, Model], max_body: int, max_texts: int
) -> APIRouter:
    """The protocol's routes over `classifiers` by model name. `max_body` is in bytes."""
    api = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"])
    models: dict[str, Model] = {**classifiers, **others}
    find = finder(classifiers)
    find_any = finder(models)

    @api.get("/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @api.get("/health/ready")
    async def ready() -> Response:
        waiting = [name for name, model in models.items() if not model.ready]
        if waiting:
            raise RequestError(503, f"not ready yet: {', '.join(waiting)}", 1)
        return JSONResponse({"ready": True})

    @api.get("")
    async def server() -> dict[str, Any]:
        return {"name": "pliant", "version": __version__, "extensions": ["binary_tensor_data"]}

    @api.get("/models/{model}/versions/{version}")
    @api.get("/models/{model}")
    async def metadata(model: str, version: str = VERSION) -> dict[str, Any]:
        classifier = find(model, version)
        return {
            "name": classifier.name,
            "versions": [VERSION],
            "platform": "pliant_encoder",
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
            "outputs": [{"name": name, "datatype": type_, "shape": [-1, -1]} for name, type_ in _OUTPUTS.items()],
            "parameters": {"labels": ",".join(classifier.labels)},
        }

    @api.get("/models/{model}/versions/{version}/ready")
    @api.get("/models/{model}/ready")
    async def model_ready(model: str, version: str = VERSION) -> Response:
        if not find_any(model, version).ready:
            raise RequestError(503, f"{model} is not ready yet", 1)
        return JSONResponse({"name": model, "ready": True})

    schema = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": InferRequest.model_json_schema()}},
        }
    }

    @api.post("/models/{model}/versions/{version}/infer", openapi_extra=schema)
    @api.post("/models/{model}/infer", openapi_extra=schema)
    async def infer(request: Request, model: str, version: str = VERSION) -> Response:
        classifier = find(model, version)
        body = await read_body(request, max_body)
        head, tail = _split(body, request.headers.get(_HEADER_LENGTH))
        call = validated_json(InferRequest, head)
        texts = _texts(call, tail, max_texts)
        outputs = _requested(call)
        options = {key: value for key, value in call.parameters.items() if key != "binary_data_output"}
        predictions = await classifier.classify(texts, validated(ClassifyParameters, options))
        return _respond(model, call.id, predictions, outputs)

    return api


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    if header_length is None:
        return body, b""
    if not header_length.isdecimal() or len(header_length) > 10 or int(header_length) > len(body):
        raise RequestError(400, f"{_HEADER_LENGTH}: got {header_length[:60]!r}; the body has {len(body)} bytes")
    return body[: int(header_length)], body[int(header_length) :]


def _texts(call: InferRequest, tail: bytes, max_texts: int) -> list[str]:
    if len(call.inputs) != 1 or call.inputs[0].name != "text":
        given = ", ".join(tensor.name for tensor in call.inputs) or "none"
        raise RequestError(400, f"inputs: got {given}; exactly one is allowed, named text")
    tensor = call.inputs[0]
    if tensor.datatype != "BYTES":
        raise RequestError(400, f"inputs.0.datatype: got {tensor.datatype!r}; allowed: BYTES")
    if not tensor.shape or min(tensor.shape) < 0 or len(tensor.shape) > 2 or tensor.shape[1:] not in ([], [1]):
        raise RequestError(400, f"inputs.0.shape: got {tensor.shape}; allowed: [n] or [n, 1]")
    size = tensor.parameters.get("binary_data_size")
    if size is None and not tail:
        texts = list(_flat(tensor.data or []))
    elif not isinstance(size, int) or isinstance(size, bool) or size != len(tail):
        raise RequestError(
            400, f"inputs.0.parameters.binary_data_size: got {size!r}; {len(tail)} bytes follow the JSON"
        )
    else:
        texts = list(_unpack(tail))
    if len(texts) != math.prod(tensor.shape):
        raise RequestError(400, f"inputs.0.shape: got {tensor.shape} for {len(texts)} texts")
    return bounded(texts, max_texts)


def _flat(data: list[Any]) -> Iterator[str]:
    for item in data:
        if isinstance(item, list) and len(item) == 1:
            item = item[0]
        if not isinstance(item, str):
            raise RequestError(400, f"inputs.0.data: got {str(item)[:60]!r}; allowed: strings")
        yield item


def _unpack(tail: bytes) -> Iterator[str]:
    at = 0
    while at < len(tail):
        if at + 4 > len(tail) or at + 4 + (length := struct.unpack_from("<I", tail, at)[0]) > len(tail):
            raise RequestError(400, "inputs.0: the binary tensor ends within an element")
        try:
            yield tail[at + 4 : at + 4 + length].decode()
        except UnicodeDecodeError as error:
            raise RequestError(400, f"inputs.0: a text is not UTF-8: {error}") from None
        at += 4 + length


def _requested(call: InferRequest) -> dict[str, bool]:
    """The names of the outputs to answer with, and whether each in binary."""
    default = call.parameters.get("binary_data_output", False)
    if not isinstance(default, bool):
        raise RequestError(400, f"parameters.binary_data_output: got {default!r}; allowed: true or false")
    if not call.outputs:
        return dict.fromkeys(_OUTPUTS, default)
    requested = {}
    for output in call.outputs:
        if output.name not in _OUTPUTS:
            raise RequestError(400, f"outputs: got {output.name!r}; allowed: {', '.join(_OUTPUTS)}")
        if "classification" in output.parameters:
            raise RequestError(400, f"outputs.{output.name}: the classification extension is not there; use top_k")
        requested[output.name] = bool(output.parameters.get("binary_data", default))
    return requested


def _respond(model: str, id_: str | None, predictions: list[Prediction], outputs: dict[str, bool]) -> Response:
    shape = [len(predictions), len(predictions[0].labels)]
    tensors: list[dict[str, Any]] = []
    tail = b""
    for name, binary in outputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": _OUTPUTS[name], "shape": shape}
        values = [value for prediction in predictions for value in getattr(prediction, name + "s")]
        if binary:
            packed = _pack(values) if name == "label" else np.array(values, dtype="<f4").tobytes()
            tensor["parameters"] = {"binary_data_size": len(packed)}
            tail += packed
        else:
            tensor["data"] = values
        tensors.append(tensor)
    content: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": tensors}
    if id_ is not None:
        content["id"] = id_
    warnings = [f"text {index}: {item.warning}" for index, item in enumerate(predictions) if item.warning]
    if warnings:
        content["parameters"] = {"warning": "; ".join(warnings)}
    response = JSONResponse(content)
    if not tail:
        return response
    head = bytes(response.body)
    return Response(head + tail, media_type="application/octet-stream", headers={_HEADER_LENGTH: str(len(head))})


def _pack(labels: list[str]) -> bytes:
    encoded = [label.encode() for label in labels]
    return b"".join(struct.pack("<I", len(label)) + label for label in encoded)
