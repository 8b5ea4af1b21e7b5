"""OpenAI's text endpoints, as the `openai` client calls them: /v1/completions, /v1/chat/completions,
/v1/responses and /v1/models.

Errors are in OpenAI's shape (`openai_errors`). One that comes before the first token has its own HTTP status, streamed
or not; one that comes later is the last event of the stream.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from pliant.deployments.http.body import off_loop, read_body
from pliant.deployments.http.grammars import in_own_thread
from pliant.deployments.http.openai_answers import ChatShape, CompletionShape, Echo, Json, Usage, prompt_logprobs
from pliant.deployments.http.openai_responses import ResponsesRequest, renamed
from pliant.deployments.http.openai_schemas import ChatRequest, CompletionRequest, GenerationRequest, parsed
from pliant.deployments.http.openai_stream import ChunkStream, interleaved
from pliant.deployments.http.openapi import answers, json_body
from pliant.deployments.http.places import hold
from pliant.deployments.http.response_events import Writer, stream, whole
from pliant.deployments.http.resumption import Delivered, answered_by, drawn, last_event, rest
from pliant.deployments.http.routes import DirectRoute
from pliant.deployments.http.tool_calls import grammar, parser
from pliant.deployments.llm.asked import AskedOfModels, Prepared
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.generations import bound
from pliant.deployments.llm.generations import generations as of_replicas
from pliant.deployments.llm.request import Piece, merged
from pliant.deployments.llm.scored_prompts import with_scores, without_answers
from pliant.deployments.llm.served_models import ServedModel, ServedModels
from pliant.deployments.serving.outcome import RequestError

_SCORE_BYTES = 64
"""About what a token and its log probability take in an answer."""
Call = TypeVar("Call", CompletionRequest, ChatRequest, ResponsesRequest)
S = TypeVar("S", CompletionShape, ChatShape)


def router(models: ServedModels, max_body: int) -> APIRouter:
    """The routes over `models`. `max_body` is in bytes."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=DirectRoute)
    media = answers("application/json", "text/event-stream")

    async def read(
        request: Request, kind: type[Call], prepare: Callable[[Call, str, int, ServedModel], Awaitable[Prepared[S]]]
    ) -> tuple[Call, str, ServedModel, Prepared[S]]:
        """What is asked, the answer's name, of whom, and what that is to him: `prepare` makes it of the call, the name,
        a seed and the model. Raises RequestError.
        """
        body = await read_body(request, max_body)
        call = await off_loop(len(body), lambda: parsed(kind, body))
        found = await models.named(call.model)
        name, seed = drawn(request)
        if isinstance(found, ServedModel):
            hold(request.scope, found.base.name)
            return call, name, found, await prepare(call, name, seed, found)
        hold(request.scope, found.name)
        if isinstance(call, GenerationRequest) and call.stream:
            last_event(request, 1)  # what makes no sense is refused before anybody begins to answer
        asked = AskedOfModels(models, lambda: call.question, partial(prepare, call, name, seed))
        served = await models.pass_on(found, asked, answered_by(request))
        return call, name, served, await asked.prepared(served)

    @api.get("/models")
    async def listing() -> Response:
        return Response(models.listing(), media_type="application/json")

    @api.get("/models/{model:path}")
    async def card(model: str) -> Json:
        return await models.card(model)

    @api.post("/completions", openapi_extra=json_body(CompletionRequest), responses=media)
    async def complete(request: Request) -> Response:
        call, name, served, prepared = await read(request, CompletionRequest, _completion)
        delivered = last_event(request, len(prepared.generations)) if call.stream else None
        return await _answer(served, call, prepared, f"cmpl-{name}", delivered)

    @api.post("/chat/completions", openapi_extra=json_body(ChatRequest), responses=media)
    async def chat(request: Request) -> Response:
        call, name, served, prepared = await read(request, ChatRequest, _chat)
        delivered = last_event(request, len(prepared.generations)) if call.stream else None
        return await _answer(served, call, prepared, f"chatcmpl-{name}", delivered)

    @api.post("/responses", openapi_extra=json_body(ResponsesRequest), responses=media)
    async def respond(request: Request) -> Response:
        call, name, served, ([generation], shape, prompt_tokens) = await read(request, ResponsesRequest, _response)
        writer = Writer(call, served.name, name, prompt_tokens)
        pieces = interleaved([served.answer(generation)])
        if call.stream:
            return stream(pieces, shape, writer)
        return JSONResponse(await whole(pieces, shape, writer))

    return api


def _tokens(call: CompletionRequest) -> int | None:
    return 1 if call.max_tokens == 0 else call.max_tokens


async def _completion(call: CompletionRequest, _name: str, seed: int, served: ServedModel) -> Prepared[CompletionShape]:
    model = served.base
    bound(len(call.prompts) * call.choices)
    prompts = [await model.encode(prompt) for prompt in call.prompts]
    shape = CompletionShape(model.token_texts, _echo(model, call, prompts), call.logprobs, call.prompt_logprobs)
    generations = await of_replicas(served, call, prompts, _tokens(call), call.logprobs, seed)
    return Prepared(generations, shape, sum(map(len, prompts)))


async def _response(call: ResponsesRequest, name: str, seed: int, served: ServedModel) -> Prepared[ChatShape]:
    try:
        return await _chat(call.chat(), name, seed, served)
    except RequestError as error:
        raise renamed(error) from None


def _echo(model: LanguageModel, call: CompletionRequest, prompts: Sequence[tuple[int, ...]]) -> list[Echo] | None:
    if not call.echo:
        return None
    texts = [model.text(prompt) for prompt in call.prompts]
    echoes = [Echo(text, ids[0]) for text, ids in zip(texts, prompts, strict=True)]
    return [echo for echo in echoes for _ in range(call.choices)]


async def _chat(call: ChatRequest, name: str, seed: int, served: ServedModel) -> Prepared[ChatShape]:
    model = served.base
    parsers = [parser(call, model.tool_form) for _ in range(call.choices)]
    messages = [message.for_template() for message in call.messages]
    prompt = await model.encode_chat(messages, call.for_template(), call.chat_template_kwargs)
    bound_to = await in_own_thread(partial(grammar, call, model.tool_form)) if call.tools else None
    wanted = call.max_completion_tokens or call.max_tokens
    generations = await of_replicas(served, call, [prompt], wanted, call.alternatives, seed, bound_to)
    thoughts = [] if call.bound or call.must_call else model.reasoning(prompt, call.choices)
    shape = ChatShape(model.token_texts, [each for each in parsers if each], name, thoughts)
    return Prepared(generations, shape, len(prompt))


async def _answer(
    served: ServedModel,
    call: GenerationRequest,
    prepared: Prepared[Any],
    name: str,
    delivered: Delivered | None,
) -> Response:
    """Run all generations; stream what of them is not `delivered`, or wait for the last."""
    generations, shape, prompt_tokens = prepared
    created = int(time.time())
    passage = served.passed_on
    warning = {"warning": passage.warning} if passage and passage.warning else {}

    def envelope(kind: str, choices: list[Json]) -> Json:
        return {
            "id": name,
            "object": kind,
            "created": created,
            "model": served.name,
            "system_fingerprint": served.fingerprint,
            "choices": choices,
            **warning,
        }

    def skip(piece: Piece) -> None:
        shape.part(0, piece)
        usage.add(0, piece)

    usage = Usage(prompt_tokens, call.choices)
    answers = interleaved([served.answer(generation) for generation in generations])
    if call.prompt_alternatives is not None:
        answers = with_scores(answers, call.choices)
    if call.max_tokens == 0:
        answers = without_answers(answers)
    if call.stream:
        counted = usage if call.with_usage else None
        pieces = rest(answers, delivered, skip) if delivered else answers
        mark = passage.mark if passage else ""
        return ChunkStream(pieces, len(generations), shape, partial(envelope, shape.chunk), counted, delivered, mark)
    parts: list[list[Piece]] = [[] for _ in generations]
    async with aclosing(answers):
        async for index, piece in answers:
            parts[index].append(piece)
            usage.add(index, piece)
    wholes = [merged(pieces) for pieces in parts]

    def written() -> Response:
        content = envelope(shape.whole, [shape.choice(index, answer) for index, answer in enumerate(wholes)])
        if isinstance(call, ChatRequest) and (rows := wholes[0].prompt_logprobs) is not None:
            content["prompt_logprobs"] = prompt_logprobs(served.base.token_texts, rows, call.prompt_logprobs or 0)
        return JSONResponse({**content, "usage": usage.json()})

    scored = sum(len(answer.prompt_logprobs or ()) for answer in wholes)
    return await off_loop(scored * (1 + (call.prompt_alternatives or 0)) * _SCORE_BYTES, written)
