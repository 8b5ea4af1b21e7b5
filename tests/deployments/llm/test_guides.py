"""Answers that are bound: to a grammar, to leave words out, to have so many tokens, to end with some."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_executor import EOS, ScriptedExecutor, byte_tokenizer
from tokenizers import Tokenizer

from pliant.deployments.http import grammars
from pliant.deployments.llm.detokenizer import TokenBytes
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.guide import GuideError, Guides, masks
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.sampling import Sampling

MAX_LENGTH = 200
TOKENIZER = byte_tokenizer()
GUIDES = Guides(TOKENIZER, TokenBytes(TOKENIZER), (EOS,), EOS + 1)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["for", "with"]}, "lines": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["name", "lines"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": grammars.json_schema(SCHEMA, "p"),
    "regex": grammars.regex("[ab]{3,9}é?", "p"),
    "choice": grammars.choice(["left", 'ri"ght', "été"], "p"),
    "lark": grammars.lark('start: "(" start? ")"', "p"),
    "gbnf": grammars.lark('root ::= "x" root | "y"', "p"),
}


def bound(grammar: str | None, seed: int = 0, id: str = "a", **options: Any) -> Generation:
    return Generation(id, (1, 2, 3), 150, Sampling(seed=seed), grammar=grammar, **options)


def answers(
    *generations: Generation, pipelined: bool = False, slots: int = 3, eos: tuple[int, ...] = (EOS,)
) -> dict[str, Piece]:
    """Of an engine that has them all at a time."""
    tokenizer = TOKENIZER if EOS in eos else without_special_tokens()
    engine = Engine(ScriptedExecutor(slots, MAX_LENGTH, pipelined), tokenizer, eos, 100, 0.05, debug=True)
    pieces: dict[str, list[Piece]] = {}
    for generation in generations:
        engine.add(generation, engine.guide(generation))
        pieces[generation.id] = []
    while engine.busy:
        for id, item in engine.step():
            assert isinstance(item, Piece), item
            assert not (pieces[id] and pieces[id][-1].finish)
            pieces[id].append(item)
    return {id: merged(parts)._replace(prompt_s=None, cached=None) for id, parts in pieces.items()}


def fits(kind: str, text: str) -> bool:
    if kind == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "regex":
        return 3 <= len(text.removesuffix("é")) <= 9 and not text.removesuffix("é").strip("ab")
    if kind == "choice":
        return text in ("left", 'ri"ght', "été")
    if kind == "lark":
        return text == "(" * (len(text) // 2) + ")" * (len(text) // 2) != ""
    return text.strip("x") == "y" and text.endswith("y")


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_bound_answers_fit_whatever_else_there_is(kind: str, pipelined: bool) -> None:
    asked = [bound(GRAMMARS[kind], seed, str(seed)) for seed in range(12)]
    free = [bound(None, seed, f"free {seed}") for seed in range(6)]
    mixed = [generation for pair in zip(asked, asked[6:] + free, strict=True) for generation in dict.fromkeys(pair)]
    together = answers(*dict.fromkeys(mixed), pipelined=pipelined)
    for generation in asked:
        answer = together[generation.id]
        if answer.finish == "stop":
            assert fits(kind, answer.text), answer.text
        assert answers(generation)[generation.id] == answer
    assert any(together[generation.id].finish == "stop" for generation in asked)
    for generation in free:
        assert answers(generation)[generation.id] == together[generation.id]


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(sorted(GRAMMARS)), seed=st.integers(0, 40), share=st.floats(0, 1), pipelined=st.booleans())
def test_a_bound_answer_goes_on_where_it_was(kind: str, seed: int, share: float, pipelined: bool) -> None:
    generation = bound(GRAMMARS[kind], seed, bad_words=((ord("a"), ord("b")),))
    whole = answers(generation)["a"]
    cut = int(share * (len(whole.tokens) - 1))
    rest = answers(generation._replace(generated=whole.tokens[:cut]), pipelined=pipelined)["a"]
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    assert rest.finish == whole.finish
    assert whole.text.endswith(rest.text)


def without_special_tokens() -> Tokenizer:
    content = json.loads(TOKENIZER.to_str())
    content["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(content))


INTEGER = grammars.json_schema({"type": "integer"}, "p")
ENDS: list[tuple[int, ...]] = [(), (0,), *((ord(letter),) for letter in 'ab"} 1(xy'), (ord("a"), EOS)]


@pytest.mark.parametrize("eos", ENDS, ids=str)
@pytest.mark.parametrize("kind", [*GRAMMARS, "integer"])
def test_answers_fit_whatever_token_ends_others(kind: str, eos: tuple[int, ...]) -> None:
    """None at all, or one that may be a part of the text: it must neither cut the answer nor come behind it."""
    grammar, ended = {**GRAMMARS, "integer": INTEGER}[kind], 0
    for seed in range(8):
        whole = answers(bound(grammar, seed), eos=eos)["a"]
        if whole.finish == "stop":
            ended += 1
            assert re.fullmatch("-?[0-9]+", whole.text) if kind == "integer" else fits(kind, whole.text), whole.text
        cut = len(whole.tokens) // 2
        rest = answers(bound(grammar, seed, generated=whole.tokens[:cut]), eos=eos)["a"]
        assert whole.tokens[:cut] + rest.tokens == whole.tokens
        assert rest.finish == whole.finish
    if kind in ("choice", "schema") or eos == (ord("a"),):
        assert ended


def test_an_answer_that_its_grammar_has_ended_does_not_go_on() -> None:
    engine = Engine(ScriptedExecutor(1, MAX_LENGTH), TOKENIZER, (EOS,), 100, 0.05)
    for text, words in (("left", "has ended"), ("rx", "no answer that its grammar allows")):
        again = bound(GRAMMARS["choice"], generated=tuple(text.encode()))
        with pytest.raises(ValueError, match=words):
            engine.add(again, engine.guide(again))


@pytest.mark.parametrize("pipelined", [False, True])
def test_bad_words_do_not_come(pipelined: bool) -> None:
    words = ((ord("a"), ord("a")), (ord("b"), ord(" "), ord("b")), (ord("a"), ord("b")))
    with_, without = 0, 0
    for seed in range(20):
        plain = answers(bound(None, seed, ignore_eos=True))["a"].tokens
        kept = answers(bound(None, seed, ignore_eos=True, bad_words=words), pipelined=pipelined)["a"].tokens
        for word in words:
            with_ += has(plain, word)
            without += has(kept, word)
    assert with_ > 20
    assert without == 0


def has(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(word)] == word for at in range(len(tokens)))


def test_tokens_may_end_an_answer_and_their_text_is_left_out() -> None:
    plain = answers(bound(None, ignore_eos=True))["a"]
    at = plain.tokens.index(ord("b"))
    cut = answers(bound(None, ignore_eos=True, stop_token_ids=(ord("b"),)))["a"]
    assert (cut.tokens, cut.finish) == (plain.tokens[: at + 1], "stop")
    assert cut.text == bytes(plain.tokens[:at]).decode(errors="replace")


def test_stop_texts_wait_for_the_least_number_of_tokens() -> None:
    for least in (0, 30):
        generation = bound(None, ignore_eos=True, stop=("b",))
        generation = generation._replace(sampling=replace(generation.sampling, min_tokens=least))
        answer = answers(generation)["a"]
        assert answer.finish == "stop"
        assert len(answer.tokens) > least
        assert "b" not in answer.text[least:]
    assert "b" in answer.text


def test_a_grammar_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(GuideError, match="cannot be followed"):
        GUIDES.guide(bound("start: b"))


def test_no_token_beyond_the_tokenizer_s_is_allowed() -> None:
    guide = Guides(TOKENIZER, TokenBytes(TOKENIZER), (EOS,), 500).guide(bound(GRAMMARS["choice"]))
    assert guide
    [mask] = masks([(0, guide)]).bits
    assert len(mask) == 16
    assert {token for token in range(512) if mask[token >> 5] >> (token & 31) & 1} == set(b"lr") | {0xC3}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


STEPS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
INTERFACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["div", "button", "header", "section", "field", "form"]},
        "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "attributes": {"type": "array", "items": {"$ref": "#/$defs/attribute"}},
    },
    "$defs": {"attribute": {"type": "object", "properties": {"name": {"type": "string"}, "value": {"type": "string"}}}},
    "required": ["type", "label", "children", "attributes"],
    "additionalProperties": False,
}
JSON = r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
array: "[" [value ("," value)*] "]"
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
%ignore /[ \t\n\r]+/
"""


@pytest.mark.parametrize(
    "write",
    [
        *(lambda schema=schema: grammars.json_schema(schema, "p") for schema in (STEPS, INTERFACE, nested(40))),
        lambda: grammars.json_schema({"enum": [f"value {index * 7919} é" * 4 for index in range(1000)]}, "p"),
        lambda: grammars.json_schema({"type": "string", "maxLength": 10_000}, "p"),
        lambda: grammars.choice([f"value {index * 7919}" for index in range(1000)], "p"),
        lambda: grammars.lark(JSON, "p"),
        lambda: grammars.regex("abcdefgh" * 512, "p"),
        lambda: grammars.regex("[A-Za-z0-9 ,.]{1,50}\\n" * 170, "p"),
        lambda: grammars.regex("(" + "|".join(f"[a-f]{{1,4}}word{index}" for index in range(240)) + ")", "p"),
    ],
)
def test_ordinary_grammars_take_little_work(write: Callable[[], str]) -> None:
    guide = GUIDES.guide(bound(write()))
    assert guide
    masks([(0, guide)])
    assert guide.matcher
    assert not guide.matcher.is_error()


@pytest.mark.parametrize("schema", [nested(64), nested(300), False])
def test_a_schema_that_is_no_grammar_is_refused(schema: dict[str, Any] | bool) -> None:
    with pytest.raises(RequestError, match="p: answers cannot be bound to it: ") as refused:
        grammars.json_schema(schema, "p")
    assert refused.value.param == "p"


EXPLODES = "(a{1000}){1000}"


@pytest.mark.parametrize("text", [EXPLODES, "((a{1000}){1000}){1000}", r"[^\s\S]"])
def test_what_takes_too_much_work_is_refused_before_it_is_sent(text: str) -> None:
    with pytest.raises(RequestError, match="p: answers cannot be bound to it: no text fits it, or it takes too much"):
        grammars.regex(text, "p")


def named_one_by_the_other(rules: int, body: str = "{}") -> str:
    lines = (f"r{at}: {body.format(f'r{at + 1}')}" for at in range(rules - 1))
    return "\n".join(["start: r0", *lines, f'r{rules - 1}: "a"'])


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda: grammars.regex("a" * 6_001, "p"), "it has 6001 characters; a pattern may have 6000"),
        (lambda: grammars.lark("start: /" + "a" * 3_000 + "/ /" + "b" * 3_000 + "/", "p"), "its patterns have 6004"),
        (lambda: grammars.lark('start: "' + "a" * 16_384 + '"', "p"), "it has 16393 characters; a grammar may have"),
        (lambda: grammars.lark(named_one_by_the_other(700, "(({}))"), "p"), "it has 2099 rules, brackets and operat"),
    ],
)
def test_a_grammar_is_not_so_large_that_to_read_it_takes_long(write: Callable[[], str], problem: str) -> None:
    """Or overflows the stack of llguidance, which would end the gateway."""
    with pytest.raises(RequestError, match=re.escape(f"p: answers cannot be bound to it: {problem}")):
        write()


async def test_rules_within_rules_are_read_on_a_large_stack() -> None:
    """5,000, twice as many as end the process on a usual one."""
    assert await grammars.in_own_thread(lambda: grammars.rules(named_one_by_the_other(5_000), "p"))


async def test_no_more_wait_for_their_grammars_than_is_allowed() -> None:
    goes_on = threading.Event()
    waiting = [asyncio.create_task(grammars.in_own_thread(goes_on.wait)) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="64 grammars are being read; send fewer at once") as refused:
        await grammars.in_own_thread(lambda: None)
    assert refused.value.outcome is Outcome.SHED
    for task in waiting[2:]:
        task.cancel()
    goes_on.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await grammars.in_own_thread(lambda: "free") == "free"


def test_what_is_not_closed_ends_with_its_line() -> None:
    assert grammars._LITERAL.sub("", 'a "b\\"c\nd /e\\/\nf "g" /h/ i // "\nj') == "a \nd \nf   i \nj"


def chained(patterns: int) -> dict[str, Any]:
    """Each definition adds a pattern to those of the next one."""
    parts = {f"d{at}": {"pattern": f"x{at}", "allOf": [{"$ref": f"#/$defs/d{at + 1}"}]} for at in range(patterns)}
    return {"$defs": {**parts, f"d{patterns}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "write",
    [
        lambda: grammars.json_schema({"allOf": [{"pattern": f"x{at}"} for at in range(30)]}, "p"),
        lambda: grammars.json_schema(
            {"properties": {"a": {"items": chained(30)["$defs"]["d0"]}}, "$defs": chained(30)["$defs"]}, "p"
        ),
        lambda: grammars.json_schema(chained(30), "p"),
        lambda: grammars.lark("start: X\nX: " + " & ".join(f"/.*x{at}.*/" for at in range(30)), "p"),
        lambda: grammars.lark('start: X # "\nX: ' + " & ".join(f"/x{at}/" for at in range(30)) + ' # "', "p"),
        lambda: grammars.lark(f"start: %json {json.dumps(chained(30))}", "p"),
    ],
)
def test_patterns_that_a_text_is_to_match_at_once_are_few(write: Callable[[], str]) -> None:
    """Each doubles the work, of which llguidance counts nothing: 30 would take hours."""
    with pytest.raises(RequestError, match=r"patterns for the same text; 12 at most"):
        write()


@pytest.mark.parametrize(
    "write", [grammars.json_schema, lambda it, p: grammars.lark(f"start: %json {json.dumps(it)}", p)]
)
def test_a_number_of_which_answers_are_multiples_is_small(write: Callable[[Any, str], str]) -> None:
    with pytest.raises(RequestError, match="p: answers cannot be bound to it: its multiples take too much work"):
        write({"type": "integer", "multipleOf": 2**27}, "p")


def test_patterns_of_different_texts_may_be_many() -> None:
    fields = {f"f{at}": {"type": "string", "pattern": "^[a-z]{1,9}$"} for at in range(40)}
    grammars.json_schema({"type": "object", "properties": fields, "$defs": {"own": {"$ref": "#/$defs/own"}}}, "p")
    grammars.json_schema({"anyOf": [{"type": "string", "pattern": f"^{at}$"} for at in range(40)]}, "p")
    grammars.lark('start: "&&&&&&&&&&&&&&&&&&" X // &&&&&&&&&&&&&\nX: /&&&&&&&&&&&&&&&&[&]/', "p")


def test_a_mask_takes_no_more_work_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_followed", lambda grammar, param: grammar)
    guide = GUIDES.guide(bound(grammars.regex(EXPLODES, "p")))
    assert guide
    masks([(0, guide)])
    with pytest.raises(GuideError, match="too many expressions"):
        guide.push(ord("a"))


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("eos", [(), (0,), (EOS,), (ord("y"),)])
def test_an_answer_that_cannot_go_on_ends_with_an_error(
    pipelined: bool, eos: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars that meet their limits, and one whose only text is not wanted."""
    monkeypatch.setattr(grammars, "_followed", lambda grammar, param: grammar)
    yes = tuple(b"ye")
    tokenizer = TOKENIZER if EOS in eos else without_special_tokens()
    engine = Engine(ScriptedExecutor(3, MAX_LENGTH, pipelined), tokenizer, eos, 100, 0.05, debug=True)
    for id, grammar, words in (
        ("work", grammars.regex(EXPLODES, "p"), ()),
        ("lexemes", grammars.rules("start: " + " | ".join(f"/[ab ]*x{n}/" for n in range(3000)), "p"), ()),
        ("words", grammars.choice(["yes"], "p"), (yes,)),
        ("free", None, ()),
    ):
        generation = bound(grammar, id=id, bad_words=words, ignore_eos=id == "free")
        engine.add(generation, engine.guide(generation))
    last: dict[str, Piece | Exception] = {}
    while engine.busy:
        last |= dict(engine.step())
    assert not engine.failure
    for id in ("work", "lexemes", "words"):
        assert isinstance(last[id], GuideError), last[id]
        assert "no answer that its grammar allows" in str(last[id])
    assert isinstance(last["free"], Piece)
    assert last["free"].finish == "length"


def test_grammars_that_name_tokens_are_for_replicas() -> None:
    assert GUIDES.guide(bound(grammars.lark('start: "a" <[256]>', "p")))
    assert grammars.lark('start: "a" <|im_end|>', "p")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "what"}, "p"),
        ({"properties": {"a": {"items": {"type": "what"}}}}, "p.properties.a.items"),
        ({"anyOf": [{"type": "string"}, {"pattern": "(", "type": "string"}]}, "p.anyOf[1]"),
        ({"$defs": {"n": {"items": {"type": "what"}}}, "properties": {"a": {"$ref": "#/$defs/n"}}}, "p.$defs.n.items"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "p.properties.a"),
    ],
)
def test_an_invalid_schema_is_refused_with_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.json_schema(schema, "p")
    assert refused.value.param == place
    assert refused.value.reason.startswith(f"{place}: answers cannot be bound to it: ")


@pytest.mark.parametrize("least", [10**400, float("inf")], ids=["digits", "infinity"])
def test_a_schema_with_a_number_that_is_too_large_is_refused(least: float) -> None:
    with pytest.raises(RequestError, match="p: answers cannot be bound to it: ") as refused:
        grammars.json_schema({"type": "integer", "minimum": least}, "p")
    assert refused.value.param == "p"
