"""What a schema demands of one value, against every way to choose among its alternatives."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.deployments.http import schema_demands
from pliant.deployments.http.schema_demands import MOST_PATTERNS, MOST_STATES, check

Schema = dict[str, Any]

LEAVES = st.sampled_from([{}, {"type": "string"}, {"pattern": "a"}, {"pattern": "b", "format": "date"}])
NAMES = st.sampled_from("ab")


def parts_of(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "pattern": st.just("x"),
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": some,
            "allOf": some,
            "anyOf": some,
            "oneOf": some,
        },
    )


SCHEMAS = st.recursive(LEAVES, parts_of, max_leaves=12)


def choices(part: Schema) -> Iterator[list[Schema]]:
    """The parts that hold together, for each choice among alternatives."""
    of_all = [list(choices(each)) for each in part.get("allOf", [])]
    of_any = [[one for each in part[key] for one in choices(each)] for key in ("anyOf", "oneOf") if part.get(key)]
    for chosen in itertools.product(*of_all, *of_any):
        yield [part, *itertools.chain.from_iterable(chosen)]


def inner(part: Schema, place: tuple[str, Any]) -> Schema | None:
    kind, name = place
    if kind == "property":
        found: Schema | None = part.get("properties", {}).get(name, part.get("additionalProperties"))
        return found
    listed = part.get("prefixItems", [])
    return listed[name] if name is not None and name < len(listed) else part.get("items")


PLACES = [("property", name) for name in ("a", "b", "c")] + [("item", index) for index in (0, 1, 2, None)]


def most_patterns(parts: list[Schema]) -> int:
    """That a value, or one inside it, is to match which fits all `parts`, at worst."""
    worst = 0
    for chosen in itertools.product(*(list(choices(part)) for part in parts)):
        together = list(itertools.chain.from_iterable(chosen))
        worst = max(worst, sum(key in part for part in together for key in ("pattern", "format")))
        for place in PLACES:
            inside = [found for part in together if (found := inner(part, place)) is not None]
            if inside:
                worst = max(worst, most_patterns(inside))
    return worst


@given(SCHEMAS)
def test_patterns_are_counted_as_every_choice_has_them(schema: Schema) -> None:
    found = schema_demands._Reader(schema).demands(schema)
    assert found.worst_patterns == most_patterns([schema])


def patterned(name: str, count: int) -> Schema:
    return {"allOf": [{"properties": {name: {"pattern": f"x{at}"}}} for at in range(count)]}


@pytest.mark.parametrize(
    "schema",
    [
        patterned("a", MOST_PATTERNS + 1),
        {"properties": {"a": {"pattern": "x"}}, **patterned("a", MOST_PATTERNS)},
        {"additionalProperties": {"pattern": "x"}, **patterned("a", MOST_PATTERNS)},
        {"items": patterned("a", MOST_PATTERNS + 1)},
        {"$defs": {"d": patterned("a", MOST_PATTERNS)}, "$ref": "#/$defs/d", "properties": {"a": {"pattern": "x"}}},
    ],
)
def test_patterns_of_one_property_from_many_places_are_few(schema: Schema) -> None:
    with pytest.raises(ValueError, match=f"it has {MOST_PATTERNS + 1} patterns for the same text"):
        check(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": MOST_STATES + 1},
        {"multipleOf": 2**27},
        {"multipleOf": 9973000},
        {"multipleOf": 1.23457},
        {"properties": {"a": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 4}]}}},
        {"properties": {f"p{at}": {"multipleOf": 9001 + at} for at in range(6)}},
    ],
)
def test_multiples_that_take_too_much_work_are_refused(schema: Schema) -> None:
    with pytest.raises(ValueError, match="its multiples take too much work"):
        check(schema)


@pytest.mark.parametrize(
    "schema",
    [
        *({"multipleOf": value} for value in (1, 7, 0.01, 0.25, 1000000, 10**30, 1e-9, MOST_STATES, 0, -3, True, "2")),
        {"multipleOf": math.inf},
        {"anyOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
        {"properties": {f"p{at}": {"multipleOf": 0.05} for at in range(300)}},
        {"allOf": [{"multipleOf": 100}, {"multipleOf": 0.1}]},
        {"$defs": {"d": {"properties": {"next": {"$ref": "#/$defs/d"}, "n": {"multipleOf": 5}}}}, "$ref": "#/$defs/d"},
        True,
        {"$ref": "#/nowhere/0", "properties": [], "allOf": {}, "items": [1]},
    ],
)
def test_ordinary_schemas_pass(schema: Any) -> None:
    check(schema)


def test_a_schema_whose_parts_combine_without_end_is_refused() -> None:
    """Each definition has the next one twice, in places of its own."""
    parts: Schema = {
        f"d{at}": {"allOf": [{"properties": {name: {"$ref": f"#/$defs/d{at + 1}"}}} for name in "abab"]}
        for at in range(40)
    }
    schema = {"$defs": {**parts, "d40": {"pattern": "x"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(ValueError, match="too many"):
        check(json.loads(json.dumps(schema)))
