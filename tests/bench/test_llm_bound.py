"""The benchmark of answers that are bound to JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from pliant.bench.llm import bound, checkpoints
from pliant.deployments.http.grammars import json_schema
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Piece
from pliant.kernels.decoder.executor import load

SCALE = bound.Scale(rows=3, steps=4, repetitions=2, schemas=12)
SIZE = checkpoints.Size("tiny", hidden=64, layers=2, heads=2, intermediate=96, vocab=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return checkpoints.checkpoint(SIZE, "float32")


def engine(folder: Path, length: int) -> Engine:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    executor = load(folder, SCALE.rows, length, "float32", "cpu", 1)
    return Engine(executor, tokenizer, (bound.end(tokenizer),), queue=SCALE.schemas, stall_s=0.05)


def test_schemas_are_of_different_shape_by_seed_and_can_be_followed() -> None:
    found = bound.schemas(200, seed=1)
    assert len({json.dumps(schema, sort_keys=True) for schema in found}) == 200
    assert found == bound.schemas(200, seed=1) != bound.schemas(200, seed=2)
    for schema in found:
        Draft202012Validator.check_schema(schema)
        json_schema(schema, "schema")


def test_it_says_how_many_answers_fit_and_what_a_step_costs(folder: Path) -> None:
    calls: list[None] = []

    def done() -> None:
        calls.append(None)

    [share] = bound.valid(engine(folder, bound.VALID_LENGTH), SCALE, SIZE.vocab, done).figures
    assert (share.name, share.value) == ("schema_valid_share", 1.0)
    [cost] = bound.overhead(engine(folder, SCALE.length), SCALE, SIZE.vocab, done).figures
    assert cost.name == "schema_step_overhead"
    assert cost.value > 0
    assert len(calls) == SCALE.runs


@pytest.mark.parametrize(
    ("text", "finish", "right"),
    [("3", "stop", True), ("3", "length", False), ("4", "stop", False), ("{", "stop", False)],
)
def test_only_what_has_ended_and_fits_counts(text: str, finish: Any, right: bool) -> None:
    assert bound.fits({"const": 3}, Piece((1,), text, None, finish)) is right
