"""Conversations and tools, as OpenAI's clients send them and as chat templates read them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from pliant.deployments.http.openai_body import Body, Neutral
from pliant.deployments.serving.outcome import Outcome, RequestError

Json = dict[str, Any]
_MOST_TOOLS = 128
_NOT_CALLED: Json = {"tool_call_id": {"type": "null"}}
_NO_CALLS: Json = {"tool_calls": {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}}
_SAID: Json = {"content": {"type": ["string", "array"]}}
_BY_ROLE: Json = {
    "anyOf": [
        {
            "properties": {"role": {"enum": ["system", "developer", "user"]}, **_SAID, **_NO_CALLS, **_NOT_CALLED},
            "required": ["content"],
        },
        {"properties": {"role": {"const": "assistant"}, **_SAID, **_NOT_CALLED}, "required": ["content"]},
        {
            "properties": {
                "role": {"const": "assistant"},
                "tool_calls": {"type": "array", "minItems": 1},
                **_NOT_CALLED,
            },
            "required": ["tool_calls"],
        },
        {
            "properties": {"role": {"const": "tool"}, **_SAID, **_NO_CALLS, "tool_call_id": {"type": "string"}},
            "required": ["content", "tool_call_id"],
        },
    ]
}
"""What `Message` checks beside its fields, as a JSON schema."""


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a conversation. `developer` is what newer clients call `system`."""

    model_config = ConfigDict(json_schema_extra=_BY_ROLE)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    """Only an assistant that calls tools may leave it out."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool: which call it answers."""
    reasoning_content: str | None = None
    """Of an assistant: what it thought, for templates that look at it. Of vLLM."""
    refusal: Annotated[Any, Neutral()] = None
    audio: Annotated[Any, Neutral()] = None
    annotations: Annotated[Any, Neutral(([],))] = None
    function_call: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _possible(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("has no content; only an assistant's message with tool_calls may have none")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"has tool_calls and is of role {self.role}; only an assistant calls tools")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("has a tool_call_id if it is of role tool, and only then")
        return self

    @property
    def text(self) -> str:
        """Its parts as lines of one text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> Json:
        """The message as chat templates read it: arguments of calls are objects, as far as they are."""
        message: Json = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        given = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        message |= {key: value for key, value in given.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _object(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    """A JSON schema; none takes any object."""
    strict: bool | None = None
    """Bind the arguments to the schema, whoever chooses the tool."""


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ToolRequest(Body):
    """The parameters of a chat that are about tools."""

    tools: Annotated[list[Tool], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Without it, "auto" if there are tools."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""

    @model_validator(mode="after")
    def _tools_are_there(self) -> ToolRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError(Outcome.REJECTED, "tools: two have the same name; names must differ", param="tools")
        if self.named is not None and self.named not in names:
            reason = f"tool_choice: there is no tool {self.named!r}; there are: {', '.join(names) or 'none'}"
            raise RequestError(Outcome.REJECTED, reason, param="tool_choice")
        if self.tool_choice == "required" and not names:
            raise RequestError(Outcome.REJECTED, "tool_choice: required, and there are no tools", param="tool_choice")
        return self

    @property
    def named(self) -> str | None:
        """The one tool that is to be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        """Whether the answer is bound to calls."""
        return self.tool_choice == "required" or self.named is not None

    @property
    def usable(self) -> list[Function]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        return [tool.function for tool in self.tools or () if self.named in (None, tool.function.name)]

    def for_template(self) -> list[Json] | None:
        """The tools as chat templates read them."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


def _object(arguments: str) -> Any:
    """What stands in `arguments`; as they are, if that is no object, or has half a surrogate pair, which is no text."""
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
