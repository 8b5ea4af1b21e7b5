"""OpenAI's /v1/embeddings, as the `openai` client calls it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from pliant.deployments.http.body import off_loop, read_body
from pliant.deployments.http.openai_body import Body
from pliant.deployments.http.openai_schemas import Ids, Lists, Texts, parsed
from pliant.deployments.http.openapi import answers, json_body
from pliant.deployments.http.parameters import EmbedParameters
from pliant.deployments.http.places import hold
from pliant.deployments.http.routes import DirectRoute
from pliant.deployments.http.text_models import embeds, find
from pliant.deployments.http.texts import Embedding, Input, TextEmbedder, TokenIds, many_numbers, warning_of
from pliant.deployments.http.validation import bounded
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.services import Services

MOST_TEXTS = 2048
MOST_TOKENS = 300_000
"""Of all texts of a request, as OpenAI has both."""


class PriorityBody(Body):
    """What all bodies take that texts are sent in. Not of OpenAI."""

    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    """Refuse the request at once if its answer would take longer; without it, the service's own objective."""
    utility: Annotated[float, Field(ge=0, le=1)] = 1.0
    """What the answer is worth: under load, requests of low utility are refused first."""


class EmbeddingRequest(PriorityBody):
    """Body of POST /v1/embeddings."""

    model: str
    input: str | Texts | Ids | Lists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """How many numbers of each embedding to answer with, the first ones."""
    prompt_name: str | None = None
    """Which of the model's prompts goes before each text. Not of OpenAI."""
    user: str | None = None

    @property
    def texts(self) -> list[Input]:
        given = self.input
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [TokenIds(given)]
        return [text if isinstance(text, str) else TokenIds(text) for text in given]

    @property
    def parameters(self) -> EmbedParameters:
        return EmbedParameters(
            slo_ms=self.slo_ms, utility=self.utility, dimensions=self.dimensions, prompt_name=self.prompt_name
        )


def router(services: Services, max_body: int, at_once: int) -> APIRouter:
    """The route over `services`. `max_body` is in bytes; texts are sent `at_once`, and then as many again."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=DirectRoute)

    @api.post("/embeddings", openapi_extra=json_body(EmbeddingRequest), responses=answers("application/json"))
    async def embed(request: Request) -> Response:
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(EmbeddingRequest, body))
        embedder: TextEmbedder = await find(services, call.model, embeds, "makes vectors of texts")
        hold(request.scope, embedder.name)
        texts = bounded(call.texts, MOST_TEXTS, "text")
        found: list[Embedding] = []
        for start in range(0, len(texts), at_once):
            found += await embedder.embed(texts[start : start + at_once], call.parameters)
            _check_tokens(sum(each.tokens for each in found))

        def write() -> Response:
            return JSONResponse(_answer(embedder.name, found, call.encoding_format == "base64"))

        return await asyncio.to_thread(write) if many_numbers(found) else write()

    return api


def _check_tokens(tokens: int) -> None:
    """Raise RequestError unless the texts of a request may have so many."""
    if tokens > MOST_TOKENS:
        reason = f"input: more than {MOST_TOKENS:,} tokens in one request; send fewer texts at once"
        raise RequestError(Outcome.REJECTED, reason, fault=Fault.TOO_LARGE, param="input")


def _answer(model: str, found: Sequence[Embedding], packed: bool) -> dict[str, Any]:
    tokens = sum(each.tokens for each in found)
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(each) if packed else each.vector.tolist()}
        for index, each in enumerate(found)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    more = {"warning": warning} if (warning := warning_of(found)) else {}
    if revisions := {each.revision for each in found} - {""}:
        more["system_fingerprint"] = ",".join(sorted(revisions))
    return {"object": "list", "data": data, "model": model, "usage": usage, **more}


def _packed(embedding: Embedding) -> str:
    return base64.b64encode(embedding.vector.astype("<f4").tobytes()).decode()
