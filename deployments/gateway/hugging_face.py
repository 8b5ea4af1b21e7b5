"""The Hugging Face inference shape, as `huggingface_hub.InferenceClient.text_classification` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from pliant.deployments.gateway.body import read_body
from pliant.deployments.gateway.classifier import Classifier, Prediction
from pliant.deployments.gateway.parameters import ClassifyParameters, validated_json
from pliant.deployments.gateway.validation import bounded, finder


class TextClassificationRequest(BaseModel):
    """A text, or several, to classify."""

    model_config = ConfigDict(extra="forbid")

    inputs: str | list[str]
    parameters: ClassifyParameters = ClassifyParameters()
    options: dict[str, Any] = {}
    """Of the hosted service (caching, waiting for a model): accepted, without effect."""


def router(classifiers: Mapping[str, Classifier], max_body: int, max_texts: int) -> APIRouter:
    """The route over `classifiers` by model name. `max_body` is in bytes."""
    api = APIRouter(tags=["Hugging Face"])
    find = finder(classifiers)
    schema = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": TextClassificationRequest.model_json_schema()}},
        }
    }

    @api.post("/models/{model}", openapi_extra=schema)
    async def classify(request: Request, model: str) -> Response:
        classifier = find(model)
        call = validated_json(TextClassificationRequest, await read_body(request, max_body))
        texts = bounded([call.inputs] if isinstance(call.inputs, str) else call.inputs, max_texts)
        predictions = await classifier.classify(texts, call.parameters)
        return JSONResponse([_scored(prediction) for prediction in predictions])

    return api


def _scored(prediction: Prediction) -> list[dict[str, Any]]:
    warning = {"warning": prediction.warning} if prediction.warning else {}
    return [
        {"label": label, "score": score, **warning}
        for label, score in zip(prediction.labels, prediction.scores, strict=True)
    ]
