"""What answers may be bound to: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pliant.deployments.http import grammars
from pliant.deployments.http.openai_body import VLLM, Body, Neutral
from pliant.deployments.serving.outcome import Outcome, RequestError

Json = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=4_096, fail_fast=True)]


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Accepted, without effect: every schema binds the answer."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """Of vLLM: exactly one of these."""

    json_: Annotated[Json | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Any, Neutral((), VLLM)] = None
    disable_fallback: bool | None = None
    disable_any_whitespace: Annotated[Any, Neutral((False,), VLLM)] = None
    disable_additional_properties: Annotated[Any, Neutral((False,), VLLM)] = None
    whitespace_pattern: Annotated[Any, Neutral((), VLLM)] = None


class BoundRequest(Body):
    """The parameters that bind an answer, of which a request has one at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def bound(self) -> str | None:
        """The parameter that binds the answer. Raises RequestError if several do."""
        asked = self.structured_outputs
        found = {
            "response_format": self.response_format and self.response_format.type != "text",
            "structured_outputs.json": asked and asked.json_ is not None,
            "structured_outputs.regex": asked and asked.regex is not None,
            "structured_outputs.choice": asked and asked.choice is not None,
            "structured_outputs.grammar": asked and asked.grammar is not None,
            "structured_outputs.json_object": asked and asked.json_object,
            "guided_json": self.guided_json is not None,
            "guided_regex": self.guided_regex is not None,
            "guided_choice": self.guided_choice is not None,
            "guided_grammar": self.guided_grammar is not None,
        }
        names = [name for name, given in found.items() if given]
        if len(names) > 1:
            reason = f"{names[1]}: not together with {names[0]}; an answer is bound to one of them"
            raise RequestError(Outcome.REJECTED, reason, param=names[1])
        return names[0] if names else None

    def grammar(self) -> str | None:
        """What the answer is bound to, None for nothing. May take a while. Raises RequestError."""
        param = self.bound
        asked = self.structured_outputs or StructuredOutputs()
        match param:
            case None:
                return None
            case "response_format":
                assert self.response_format
                return _of_format(self.response_format)
            case "structured_outputs.json_object":
                return grammars.json_object(param)
            case "structured_outputs.json" | "guided_json":
                given = self.guided_json if asked.json_ is None else asked.json_
                return grammars.json_schema(_schema(given, param), param)
            case "structured_outputs.regex" | "guided_regex":
                return grammars.regex(asked.regex or self.guided_regex or "", param)
            case "structured_outputs.choice" | "guided_choice":
                return grammars.choice(asked.choice or self.guided_choice or (), param)
            case _:
                return grammars.lark(asked.grammar or self.guided_grammar or "", param)


def _of_format(asked: ResponseFormat) -> str:
    if asked.type == "json_object":
        return grammars.json_object("response_format")
    param = "response_format.json_schema"
    if asked.json_schema is None:
        raise RequestError(Outcome.REJECTED, f"{param}: missing; it must be given with this type", param=param)
    schema = asked.json_schema.schema_
    return grammars.json_schema({} if schema is None else schema, f"{param}.schema")


def _schema(given: Json | str | None, param: str) -> Json:
    """vLLM also takes a schema as text."""
    if isinstance(given, dict):
        return given
    schema = grammars.read(given or "", param)
    if not isinstance(schema, dict):
        raise RequestError(Outcome.REJECTED, f"{param}: must be a JSON schema, an object", param=param)
    return schema
