"""What it costs to bind answers to JSON schemas, and whether they fit them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from pliant.bench.findings import Findings
from pliant.bench.llm.workload import prompts
from pliant.bench.report import median, ratio
from pliant.deployments.http.grammars import json_schema
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.sampling import Sampling

Json = dict[str, Any]

_PARAM = "schema"
_DEPTH = 2
"""Of what is nested in another, below the outermost."""
_TOKENS = 1024
"""Of an answer at most: several times what the schemas here take."""
_PROMPT = 16
_END = "Ġw0"
_WORDS = ("for", "with", "été", 'ri"ght', "a\\b", "line\nbreak", "")
_LEAVES = ("boolean", "null", "integer", "text", "pattern", "enum", "const")
_BRANCHES = ("object", "array", "tuple", "any")
_ALL = (*_BRANCHES, "reference", *_LEAVES)


@dataclass(frozen=True)
class Scale:
    """Rows of a step, steps of a block, pairs of blocks, and schemas."""

    rows: int
    steps: int
    repetitions: int
    schemas: int

    @property
    def runs(self) -> int:
        """Pairs of blocks, and the answers to all schemas."""
        return self.repetitions + 1

    @property
    def length(self) -> int:
        """Tokens that a slot must have for `overhead`."""
        return _PROMPT + self.tokens

    @property
    def tokens(self) -> int:
        """Of an answer whose steps are timed: it has not ended when the block has, though it began before others."""
        return 4 * self.steps


VALID_LENGTH = _PROMPT + _TOKENS
"""Tokens that a slot must have for `valid`."""


def end(tokenizer: Tokenizer) -> int:
    """Have a word of a bench's tokenizer end answers, as grammars need one; returns its id."""
    tokenizer.add_special_tokens([_END])
    found = tokenizer.token_to_id(_END)
    assert found is not None
    return found


def schemas(count: int, seed: int) -> list[Json]:
    """So many schemas, no two alike, each of which bounds how long its answers get."""
    draw = random.Random(seed)
    found: dict[str, Json] = {}
    while len(found) < count:
        schema = {
            "$defs": {"leaf": _leaf(draw.choice(_LEAVES), draw)},
            **_of_kind(draw.choice(_BRANCHES), draw, _DEPTH),
        }
        found.setdefault(json.dumps(schema, sort_keys=True), schema)
    return list(found.values())


def _schema(draw: random.Random, depth: int) -> Json:
    return _of_kind(draw.choice(_ALL if depth else _LEAVES), draw, depth)


def _of_kind(kind: str, draw: random.Random, depth: int) -> Json:
    few = range(draw.randint(1, 3))
    match kind:
        case "object":
            properties = {f"{draw.choice(_WORDS)} {number}": _schema(draw, depth - 1) for number in few}
            required = [name for name in properties if draw.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = draw.randint(0, 2)
            items = _schema(draw, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 2)}
        case "tuple":
            items_in_order = [_schema(draw, depth - 1) for _ in few]
            count = len(items_in_order)
            return {
                "type": "array", "prefixItems": items_in_order, "items": False, "minItems": count, "maxItems": count,
            }  # fmt: skip
        case "any":
            return {"anyOf": [_schema(draw, depth - 1) for _ in few]}
        case "reference":
            return {"$ref": "#/$defs/leaf"}
        case _:
            return _leaf(kind, draw)


def _leaf(kind: str, draw: random.Random) -> Json:
    match kind:
        case "integer":
            low = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}
        case "text":
            least = draw.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 12)}
        case "pattern":
            return {"type": "string", "pattern": f"^[a-f]{{{draw.randint(1, 3)},{draw.randint(3, 9)}}}(-[0-9]{{2}})?$"}
        case "enum":
            return {"enum": [*draw.sample(_WORDS, 3), draw.randint(0, 99), draw.random() < 0.5, None]}
        case "const":
            return {"const": draw.choice([*_WORDS, 1.5, [1, "a"], {"x": None}])}
        case _:
            return {"type": kind}


def overhead(engine: Engine, scale: Scale, vocab: int, done: Callable[[], object]) -> Findings:
    """Steps of rows that are each bound to another schema, and of rows that are bound to nothing, in turn."""
    endless = [json_schema(_endless(schema, scale.tokens), _PARAM) for schema in schemas(scale.rows, seed=0)]
    free = [None] * scale.rows
    _step_s(engine, endless, scale, vocab)
    bound_s: list[float] = []
    free_s: list[float] = []
    for repetition in range(scale.repetitions):
        turns: list[tuple[list[float], Sequence[str | None]]] = [(bound_s, endless), (free_s, free)]
        for seconds, grammars in turns if repetition % 2 else reversed(turns):
            seconds.append(_step_s(engine, grammars, scale, vocab))
        done()
    beside = f"{scale.rows} rows, each of another schema; {min(free_s) * 1e3:.3g} ms without"
    return Findings([ratio("schema_step_overhead", bound_s, free_s, "<= 1.1", beside)])


def _endless(schema: Json, least: int) -> Json:
    """An array of what `schema` allows."""
    definitions = schema.pop("$defs")
    return {"$defs": definitions, "type": "array", "items": schema, "minItems": least}


def _step_s(engine: Engine, grammars: Sequence[str | None], scale: Scale, vocab: int) -> float:
    """What a step takes once all prompts are computed."""
    engine.forget()
    waiting = _add(engine, grammars, scale.tokens, vocab, ignore_eos=True)
    while waiting:
        waiting -= {name for name, _ in engine.step()}
    began = time.perf_counter()
    for _ in range(scale.steps):
        engine.step()
    seconds = (time.perf_counter() - began) / scale.steps
    for number in range(len(grammars)):
        engine.cancel(str(number))
    while engine.busy:
        engine.step()
    return seconds


def valid(engine: Engine, scale: Scale, vocab: int, done: Callable[[], object]) -> Findings:
    """The share of sampled answers that have ended and fit their schemas."""
    asked = schemas(scale.schemas, seed=1)
    _add(engine, [json_schema(schema, _PARAM) for schema in asked], _TOKENS, vocab, ignore_eos=False)
    pieces: dict[str, list[Piece]] = {}
    while engine.busy:
        for name, piece in engine.step():
            assert isinstance(piece, Piece), piece
            pieces.setdefault(name, []).append(piece)
    answers = [merged(pieces[str(number)]) for number in range(len(asked))]
    fitting = sum(fits(schema, answer) for schema, answer in zip(asked, answers, strict=True))
    done()
    tokens = sum(len(answer.tokens) for answer in answers) / len(answers)
    beside = f"{len(asked)} schemas, {tokens:.3g} tokens an answer"
    return Findings([median("schema_valid_share", [fitting / len(asked)], "1", beside)])


def fits(schema: Json, answer: Piece) -> bool:
    """Whether an answer has ended, and is JSON of its schema."""
    try:
        return answer.finish == "stop" and bool(Draft202012Validator(schema).is_valid(json.loads(answer.text)))
    except ValueError:
        return False


def _add(engine: Engine, grammars: Sequence[str | None], tokens: int, vocab: int, ignore_eos: bool) -> set[str]:
    """Ask for an answer bound to each; returns their names."""
    texts = prompts(len(grammars), _PROMPT, vocab, seed=0)
    for number, (prompt, grammar) in enumerate(zip(texts, grammars, strict=True)):
        sampling = Sampling(seed=number)
        wanted = Generation(
            str(number), tuple(prompt.tolist()), tokens, sampling, ignore_eos=ignore_eos, grammar=grammar
        )
        engine.add(wanted, engine.guide(wanted))
    return {str(number) for number in range(len(grammars))}
