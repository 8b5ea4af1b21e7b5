"""What pydantic finds wrong, a line for each problem: the key as it is written, what was given, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

Location = tuple[int | str, ...]
Schema = dict[str, Any]


def explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """A line for each problem of `error`, which validating `root` raised."""
    schema = root.model_json_schema()
    for problem in error.errors():
        loc = problem["loc"]
        key = ".".join(str(part) for part in _written(schema, loc))
        if problem["type"] == "extra_forbidden":
            allowed = sorted(_node(schema, loc[:-1]).get("properties", {}))
            close = difflib.get_close_matches(str(loc[-1]), allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            yield f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
        elif problem["type"] in ("union_tag_not_found", "union_tag_invalid"):
            choice = _node(schema, loc)
            tag = problem["ctx"].get("tag")
            given = "missing" if tag is None else f"got {tag!r}"
            name = choice["discriminator"]["propertyName"]
            yield f"{key}.{name}: {given}; it must be one of {', '.join(_tags(choice))}"
        elif problem["type"] == "missing":
            yield f"{key}: missing; it must be given"
        else:
            given = "a secret" if key.endswith("password") else repr(problem["input"])
            given = given if len(given) <= 60 else given[:57] + "..."
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{key or 'the file'}: got {given}; {message[0].lower()}{message[1:]}"


def _tags(choice: Schema) -> list[str]:
    """What tells the alternatives of `choice` apart, in their order."""
    tags = {reference: tag for tag, reference in choice["discriminator"]["mapping"].items()}
    return [tags[alternative["$ref"]] for alternative in choice["oneOf"]]


def _written(schema: Schema, loc: Location) -> Iterator[int | str]:
    """`loc` without what pydantic adds to the keys of the file: names of alternatives, and marks of bad keys."""
    for index, part in enumerate(loc):
        if part != "[key]" and not {"discriminator", "anyOf"} & _node(schema, loc[:index]).keys():
            yield part


def _node(schema: Schema, loc: Location) -> Schema:
    """The schema of what is at `loc`; empty if any value may be there."""
    node = schema
    for part in loc:
        node = _resolved(schema, _member(node, part))
    return node


def _member(node: Schema, part: int | str) -> Schema:
    """The schema of the member `part` of an object, a mapping, a list, or a choice by tag."""
    found: Schema
    if part in node.get("properties", {}):
        found = node["properties"][part]
    elif "discriminator" in node:
        found = {"$ref": node["discriminator"]["mapping"][part]}
    elif "patternProperties" in node:
        found = next(iter(node["patternProperties"].values()))
    else:
        found = node.get("additionalProperties") or node.get("items") or {}
    return found


def _resolved(schema: Schema, node: Schema) -> Schema:
    """`node` itself where it refers to another; where it may be null, what it is otherwise."""
    if [*(node.get("anyOf") or ())][1:] == [{"type": "null"}]:
        node = node["anyOf"][0]
    found: Schema = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node
    return found
