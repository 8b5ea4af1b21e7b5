"""What vLLM answers beside OpenAI's API: /tokenize and /detokenize, /version, and its probes /health and /ping."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pliant import __version__
from pliant.deployments.http.body import off_loop, read_body
from pliant.deployments.http.openai_schemas import DetokenizeRequest, TokenizeRequest, parsed
from pliant.deployments.http.openapi import json_body
from pliant.deployments.http.places import hold
from pliant.deployments.llm.served_models import ServedModels
from pliant.deployments.serving.services import Services

Json = dict[str, Any]


def router(models: ServedModels, services: Services, max_body: int) -> APIRouter:
    """The routes over `models`, which are among `services`. `max_body` is in bytes."""
    api = APIRouter(tags=["vLLM"])

    @api.get("/health", response_class=Response)
    @api.get("/ping", response_class=Response)
    @api.post("/ping", response_class=Response)
    async def health() -> Response:
        """Whether all language models can answer now."""
        services.check_ready("prompts")
        return Response()

    @api.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @api.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
    async def tokenize(request: Request) -> Json:
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(TokenizeRequest, body))
        model = (await models.find(call.model)).base
        hold(request.scope, model.name)
        if call.messages is None:
            ids = await model.encode(call.prompt or "", call.add_special_tokens)
        else:
            ids = await model.encode_chat([message.for_template() for message in call.messages])
        texts = [model.tokenizer.id_to_token(token) for token in ids] if call.return_token_strs else None
        return {"count": len(ids), "max_model_len": model.max_length, "tokens": ids, "token_strs": texts}

    @api.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Json:
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(DetokenizeRequest, body))
        model = (await models.find(call.model)).base
        hold(request.scope, model.name)
        model.check_tokens(call.tokens, "tokens")
        return {"prompt": model.text(call.tokens)}

    return api
