"""The Hugging Face inference shape, as `huggingface_hub.InferenceClient` calls it for texts and images.

Texts are in `hugging_face_texts`. An image comes as it is, with parameters in the URL if at all, or in base64 within
JSON; what the JSON says of parameters goes before the URL:
`client.image_classification(image, model=f"{address}/models/digits?task=parity")`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pliant.deployments.http.body import off_loop, read_body
from pliant.deployments.http.hugging_face_texts import BODIES, answer_texts
from pliant.deployments.http.image_answers import ImageClassifier, VisionPrediction, many_labels
from pliant.deployments.http.image_tensors import decoded
from pliant.deployments.http.openapi import json_body
from pliant.deployments.http.parameters import VisionParameters, explain, validated_json
from pliant.deployments.http.places import hold
from pliant.deployments.http.routes import DirectRoute
from pliant.deployments.http.validation import bounded, finder
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.services import Services

Inputs = str | Annotated[list[str], Field(fail_fast=True)]


class ImageClassificationRequest(BaseModel):
    """An image in base64, or several, to classify."""

    model_config = ConfigDict(extra="forbid")

    inputs: Inputs
    parameters: VisionParameters = VisionParameters()
    options: dict[str, Any] = {}
    """Of the hosted service (caching, waiting for a model): accepted, without effect."""


def router(services: Services, max_body: int, most: int) -> APIRouter:
    """The route over `services`. `max_body` is in bytes, `most` texts or images are in a request."""
    api = APIRouter(tags=["Hugging Face"], route_class=DirectRoute)
    find = finder(services, "texts", "images")
    image = {"type": "string", "format": "binary"}
    schema = json_body(*BODIES, ImageClassificationRequest, **{"image/*": image})

    @api.post("/models/{model}", openapi_extra=schema)
    async def infer(request: Request, model: str) -> Response:
        service = await find(model)
        body = await read_body(request, max_body)
        hold(request.scope, service.name)
        if service.answers == "images":
            return await _classify_images(service.endpoint, body, request.query_params, most)
        return await answer_texts(service.endpoint, body, most)

    return api


async def _classify_images(vision: ImageClassifier, body: bytes, query: Mapping[str, str], most: int) -> Response:
    """A list of labels for an image, or a list of these for a list of images."""
    in_url = _in_url(query)
    if not body.lstrip().startswith(b"{"):
        return await _written(await vision.classify([body], in_url), single=True)

    def parsed() -> tuple[ImageClassificationRequest, list[bytes]]:
        call = validated_json(ImageClassificationRequest, body)
        encoded = bounded([call.inputs] if isinstance(call.inputs, str) else call.inputs, most, "image")
        return call, [decoded(text) for text in encoded]

    call, images = await off_loop(len(body), parsed)
    parameters = in_url.model_copy(update=call.parameters.model_dump(exclude_unset=True))
    return await _written(await vision.classify(images, parameters), single=isinstance(call.inputs, str))


async def _written(predictions: Sequence[VisionPrediction], single: bool) -> Response:
    def write() -> Response:
        seen = [_seen(prediction) for prediction in predictions]
        return JSONResponse(seen[0] if single else seen)

    return await asyncio.to_thread(write) if many_labels(predictions) else write()


def _in_url(query: Mapping[str, str]) -> VisionParameters:
    try:
        return VisionParameters.model_validate_strings(dict(query))
    except ValidationError as error:
        raise RequestError(Outcome.REJECTED, f"in the URL: {explain(error, VisionParameters)}") from None


def _seen(prediction: VisionPrediction) -> list[dict[str, Any]]:
    return [
        {"label": label, "score": score, "gamma": prediction.gamma, "fate": prediction.fate}
        for label, score in zip(prediction.labels, prediction.scores, strict=True)
    ]
