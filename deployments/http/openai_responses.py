"""Bodies of OpenAI's Responses endpoint, as chats. What a chat's answer is as a response, `response_events` says.

Nothing is kept between two requests: what continues a conversation has all of it in `input`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from pliant.deployments.http.openai_answers import Json
from pliant.deployments.http.openai_body import Body, Neutral
from pliant.deployments.http.openai_messages import Function
from pliant.deployments.http.openai_schemas import MOST_MESSAGES, ChatRequest
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.sampling import MOST_LOGPROBS

_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
}
"""What chats call a parameter, and responses."""
Status = Literal["in_progress", "completed", "incomplete"]


class Part(Body):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = str | Annotated[list[Part], Field(fail_fast=True)]


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class CallItem(Body):
    """A call of a tool, by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Annotated[Any, Neutral()] = None
    namespace: Annotated[Any, Neutral()] = None


class OutputItem(Body):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[Any] | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: Annotated[Any, Neutral()] = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"item {kind}"


Item = Annotated[
    Annotated[MessageItem, Tag("item message")]
    | Annotated[CallItem, Tag("item function_call")]
    | Annotated[OutputItem, Tag("item function_call_output")]
    | Annotated[ReasoningItem, Tag("item reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="must be of type message, function_call, function_call_output or reasoning",
    ),
]
"""Tags are no names of parameters, so that errors leave them out."""


class ResponseTool(Function):
    type: Literal["function"]


class NamedResponseTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None
    """Accepted, without effect: every schema binds the answer."""


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Neutral()] = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None
    """Padding of events against traffic analysis: accepted, without effect."""


class ResponsesRequest(Body):
    """Body of POST /v1/responses."""

    plain: ClassVar[Collection[str]] = ()

    model: str
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES - 1, fail_fast=True)]
    """A text, or a conversation with calls of tools, their answers and reasoning."""
    instructions: str | None = None
    """What the system says, before `input`."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Of log probabilities; reasoning comes as text, never encrypted."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    """Accepted: responses are not stored, whatever it says."""
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    previous_response_id: str | None = None
    background: Annotated[Any, Neutral((False,))] = None
    conversation: Annotated[Any, Neutral()] = None
    max_tool_calls: Annotated[Any, Neutral()] = None
    prompt: Annotated[Any, Neutral()] = None
    reasoning: Annotated[Any, Neutral(({},))] = None
    truncation: Annotated[Any, Neutral(("disabled",))] = None

    @model_validator(mode="after")
    def _possible(self) -> ResponsesRequest:
        if self.previous_response_id is not None:
            reason = "previous_response_id: responses are not stored here; send the whole conversation as input"
            raise RequestError(Outcome.REJECTED, reason, param="previous_response_id")
        if self.stream_options and not self.stream:
            reason = "stream_options: only allowed with stream: true"
            raise RequestError(Outcome.REJECTED, reason, param="stream_options")
        return self

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises RequestError."""
        logprobs = self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
        given: Json = {
            "model": self.model,
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs,
            "stream": self.stream,
        }
        if self.text and (form := self.text.format):
            schema = {"name": form.name or "", "schema": form.schema_} if form.type == "json_schema" else None
            given["response_format"] = {"type": form.type, "json_schema": schema}
        if self.tools:
            given["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
        if isinstance(named := self.tool_choice, NamedResponseTool):
            given["tool_choice"] = {"type": "function", "function": {"name": named.name}}
        else:
            given["tool_choice"] = self.tool_choice
        try:
            return ChatRequest.model_validate(given)
        except ValidationError as error:
            problem = error.errors()[0]
            raise RequestError(Outcome.REJECTED, f"input: {problem['msg']}", param="input") from None
        except RequestError as error:
            raise renamed(error) from None

    @property
    def question(self) -> str:
        """By which a route chooses who answers. Raises RequestError."""
        return self.chat().question

    def _messages(self) -> Iterator[Json]:
        """What the model thought, said and called between two answers of others is one message of the assistant's."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        turn: Json = {}
        for item in self.input:
            speaks = isinstance(item, MessageItem) and item.role == "assistant"
            if turn and (
                isinstance(item, OutputItem)
                or (isinstance(item, MessageItem) and not speaks)
                or ((speaks or isinstance(item, ReasoningItem)) and not turn.keys() <= {"role", "reasoning_content"})
            ):
                yield turn
                turn = {}
            if isinstance(item, ReasoningItem):
                turn |= {"role": "assistant", "reasoning_content": "".join(part.text for part in item.content or ())}
            elif isinstance(item, CallItem):
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                turn |= {"role": "assistant", "tool_calls": [*turn.get("tool_calls", ()), call]}
            elif isinstance(item, OutputItem):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
            elif speaks:
                turn |= {"role": "assistant", "content": _content(item.content)}
            else:
                yield {"role": item.role, "content": _content(item.content)}
        if turn.keys() & {"content", "tool_calls"}:
            yield turn


def _content(content: str | Sequence[Part]) -> str:
    """Its parts as lines of one text, as those of a chat's messages are."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def renamed(error: RequestError) -> RequestError:
    """`error` of a chat, in the words of responses."""
    for chat, here in _NAMES.items():
        if error.param and error.param.startswith(chat):
            error.param = here + error.param.removeprefix(chat)
            if error.reason.startswith(chat):
                error.reason = here + error.reason.removeprefix(chat)
            break
    return error
