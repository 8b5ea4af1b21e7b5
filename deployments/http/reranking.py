"""How well texts suit each other, and how they are labelled, in the shapes that rerankers are called by.

/rerank is Cohere's and Jina's, /score and /classify are vLLM's. A model of one label reads both texts together; one
that makes vectors compares those.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from pliant.deployments.http.body import off_loop, read_body
from pliant.deployments.http.embeddings import PriorityBody
from pliant.deployments.http.openai_body import Body
from pliant.deployments.http.openai_schemas import Texts, parsed
from pliant.deployments.http.openapi import answers, json_body
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.places import hold
from pliant.deployments.http.routes import DirectRoute
from pliant.deployments.http.text_models import find, labels, scores
from pliant.deployments.http.texts import Prediction, Scorer, TextClassifier, warning_of
from pliant.deployments.http.validation import bounded, check_count
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.services import Services
from pliant.texts import Pair

_COMPARES = "compares texts"


class Document(Body):
    text: str


class RerankRequest(PriorityBody):
    """Body of POST /rerank."""

    model: str
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    """How many to answer with, the best first; without it, all."""
    return_documents: bool = True
    """Whether the answer has their texts, too."""

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreRequest(PriorityBody):
    """Body of POST /score: one text and one or several others, or as many of both."""

    model: str
    text_1: str | Texts
    text_2: str | Texts

    def pairs(self, most: int) -> list[Pair]:
        """At most `most`. Raises RequestError if there are not as many of both."""
        firsts = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        seconds = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        check_count(len(seconds), most, "text")
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            reason = f"text_1: got {len(firsts)}, and {len(seconds)} of text_2; send one, or as many of both"
            raise RequestError(Outcome.REJECTED, reason, param="text_1")
        return [Pair(*both) for both in zip(firsts, seconds, strict=True)]


class LabelRequest(PriorityBody):
    """Body of POST /classify."""

    model: str
    input: str | Texts
    user: str | None = None


def router(services: Services, max_body: int, most: int) -> APIRouter:
    """The routes over `services`. `max_body` is in bytes, `most` texts or documents are in a request."""
    api = APIRouter(tags=["Reranking"], route_class=DirectRoute)
    media = answers("application/json")

    @api.post("/rerank", openapi_extra=json_body(RerankRequest), responses=media)
    @api.post("/v1/rerank", openapi_extra=json_body(RerankRequest), responses=media)
    @api.post("/v2/rerank", openapi_extra=json_body(RerankRequest), responses=media)
    async def rerank(request: Request) -> Response:
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(RerankRequest, body))
        scorer: Scorer = await find(services, call.model, scores, _COMPARES)
        hold(request.scope, scorer.name)
        texts = bounded(call.texts, most, "document")
        found = await scorer.relevance([Pair(call.query, text) for text in texts], call)
        best = sorted(range(len(texts)), key=lambda index: -found[index].score)[: call.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": found[index].score} for index in best]
        if call.return_documents:
            results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
        usage = _usage(sum(each.tokens for each in found))
        return JSONResponse({"id": _name("rerank"), "model": scorer.name, "results": results, "usage": usage})

    @api.post("/score", openapi_extra=json_body(ScoreRequest), responses=media)
    @api.post("/v1/score", openapi_extra=json_body(ScoreRequest), responses=media)
    async def score(request: Request) -> Response:
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(ScoreRequest, body))
        scorer: Scorer = await find(services, call.model, scores, _COMPARES)
        hold(request.scope, scorer.name)
        found = await scorer.relevance(call.pairs(most), call)
        data = [{"index": index, "object": "score", "score": each.score} for index, each in enumerate(found)]
        return JSONResponse(_list("score", scorer.name, data, sum(each.tokens for each in found), ""))

    @api.post("/classify", openapi_extra=json_body(LabelRequest), responses=media)
    async def classify(request: Request) -> Response:
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(LabelRequest, body))
        classifier: TextClassifier = await find(services, call.model, labels, "labels texts")
        hold(request.scope, classifier.name)
        texts = bounded([call.input] if isinstance(call.input, str) else call.input, most, "text")
        parameters = ClassifyParameters(slo_ms=call.slo_ms, utility=call.utility)
        found = await classifier.classify(texts, parameters)
        data = [_labelled(index, each, classifier.labels) for index, each in enumerate(found)]
        tokens = sum(each.tokens for each in found)
        return JSONResponse(_list("classify", classifier.name, data, tokens, warning_of(found)))

    return api


def _labelled(index: int, prediction: Prediction, order: Any) -> dict[str, Any]:
    by_label = dict(zip(prediction.labels, prediction.scores, strict=True))
    probs = [by_label[label] for label in order]
    return {"index": index, "label": prediction.labels[0], "probs": probs, "num_classes": len(probs)}


def _list(kind: str, model: str, data: list[dict[str, Any]], tokens: int, warning: str) -> dict[str, Any]:
    found = {"id": _name(kind), "object": "list", "created": int(time.time()), "model": model, "data": data}
    return {**found, "usage": _usage(tokens), **({"warning": warning} if warning else {})}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _name(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
