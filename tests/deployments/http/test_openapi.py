"""The OpenAPI document: whole, and as the gateway answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError
from support.tenants import keyed

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.openai_messages import Message
from pliant.deployments.http.openai_schemas import TokenizeRequest
from pliant.deployments.http.statuses import OPENAI, STATUSES, speaks_openai
from pliant.deployments.kinds import loaded
from pliant.deployments.serving.outcome import RequestError
from pliant.deployments.serving.services import Services

MISSING = object()


def document(keys: Collection[str] = ()) -> Any:
    config, services = GatewayConfig(), Services([])
    routers = [router for kind in loaded().values() for router in kind.routers(services, None, config)]
    return application(config, services, dict, bytes, routers, keyed(keys)).openapi()


def inside(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from inside(each)


def operations(told: Any) -> Iterator[tuple[str, Any]]:
    return ((path, each) for path, methods in told["paths"].items() for each in methods.values())


def test_every_reference_leads_to_a_schema() -> None:
    told = document()
    references = {part["$ref"] for part in inside(told) if "$ref" in part}
    assert {f"#/components/schemas/{name}" for name in told["components"]["schemas"]} == references
    assert not any("$defs" in part for part in inside(told))
    for schema in told["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


CALLS = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_messages_are_told_as_they_are_checked(role: str) -> None:
    schema = Draft202012Validator(Message.model_json_schema())
    given: dict[str, list[Any]] = {
        "content": ["a", [{"type": "text", "text": "a"}], [], None],
        "tool_calls": [CALLS, [], None],
        "tool_call_id": ["c", None],
    }
    for several in product(*([MISSING, *values] for values in given.values())):
        message = {key: value for key, value in zip(given, several, strict=True) if value is not MISSING}
        assert schema.is_valid({"role": role, **message}) == allowed(Message, {"role": role, **message}), message


def test_what_is_tokenized_is_told_as_it_is_checked() -> None:
    schema = Draft202012Validator(TokenizeRequest.model_json_schema())
    for prompt, messages in product([MISSING, None, "", "a"], [MISSING, None, [], [{"role": "user", "content": "a"}]]):
        given = {"prompt": prompt, "messages": messages}
        body = {key: value for key, value in given.items() if value is not MISSING}
        assert schema.is_valid(body) == allowed(TokenizeRequest, body), body


def allowed(model: type[BaseModel], body: Any) -> bool:
    try:
        model.model_validate_json(json.dumps(body))
    except (ValidationError, RequestError):
        return False
    return True


def test_probes_that_answer_nothing_say_so() -> None:
    paths = document()["paths"]
    for method, path in (("get", "/health"), ("get", "/ping"), ("post", "/ping")):
        assert "content" not in paths[path][method]["responses"]["200"]


@pytest.mark.parametrize("openai", [True, False])
def test_every_status_has_its_protocol_s_shape(openai: bool) -> None:
    table = {row.status for row in OPENAI.values()} if openai else set(STATUSES.values())
    error = "#/components/schemas/OpenAIError" if openai else "#/components/schemas/Error"
    for path, each in operations(document()):
        if speaks_openai({"path": path}) != openai:
            continue
        failures = {int(status): answer for status, answer in each["responses"].items() if status[0] != "2"}
        assert failures.keys() <= table
        assert {400, 401, 404, 405, 429, 500, 503} <= failures.keys()
        assert failures.keys() == table or "requestBody" not in each
        assert {answer["content"]["application/json"]["schema"]["$ref"] for answer in failures.values()} == {error}
        assert all("Retry-After" in failures[status]["headers"] for status in (429, 503))


def test_keys_are_told_of_where_they_are_asked_for() -> None:
    assert not any("security" in each for _, each in operations(document()))
    without = {path for path, each in operations(document(keys=["k"])) if "security" not in each}
    assert without == {"/v2/health/live", "/v2/health/ready", "/health", "/ping"}
