"""Grammars of bound answers, in the form that replicas follow (llguidance's), checked before anything is sent.

Without torch or a tokenizer: gateways make them, and begin an answer of bytes by each, to see what work it makes.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from pliant.deployments.http import schema_demands
from pliant.deployments.serving.outcome import Outcome, RequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

Json = dict[str, Any]
T = TypeVar("T")

_SPACE: JsonCompileOptions = {"whitespace_pattern": r"[ \t\n\r]{0,40}"}
"""Between the parts of JSON: a model that can only go on with spaces comes to an end."""
_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_SEVERAL = ("prefixItems", "allOf", "anyOf", "oneOf")
_MOST_LOOKED_AT = 500
"""Parts of a schema, to find the one that is wrong."""
_LEXER_WORK = 50_000
"""As llguidance counts: about 20 ms of a mask. Enums of 1,000 values and patterns of 4 kB take less than half of it."""
_LEXER_STATES = 50_000
"""Of one answer, of about 2 kB each."""
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)++/?|//[^\n]*|#[^\n]*')
"""Of a Lark grammar: strings, patterns and comments. One that is not closed ends with its line."""
_LONGEST_GRAMMAR = 16_384
"""Characters. llguidance calls itself for each rule, bracket and operator within another."""
_LONGEST_PATTERN = 6_000
"""Characters of a pattern, or of all in a grammar: their square is work that llguidance does not count: about 1 s."""
_NESTS = re.compile(r":+|[(\[?*+~]")
_MOST_NESTS = 2_000
_STACK = 64 * 2**20
"""Bytes of a thread that makes grammars. With 8 MB llguidance ends the process at 2,700 rules that name each other."""
_THREADS = 2
_MOST_WAIT = 64
"""Grammars for these threads."""
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_REMEMBERED = 20_000
"""Characters of a grammar that is not tried again."""
_LONGEST_ERROR = 100
"""Characters of what llguidance says of a grammar, which may repeat that."""


async def in_own_thread(make: Callable[[], T]) -> T:
    """What `make` makes of a grammar, in one of a few threads that do nothing else.

    Nobody can stop it; so only who sends grammars waits for it, and no more than `_MOST_WAIT`. Raises RequestError.
    """
    global _waiting
    if _waiting >= _MOST_WAIT:
        raise RequestError(Outcome.SHED, f"{_waiting} grammars are being read; send fewer at once", 1)
    _waiting += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(threads(), make)
    finally:
        _waiting -= 1


_waiting = 0


@cache
def threads() -> ThreadPoolExecutor:
    """What makes grammars, in gateways and in replicas. All are started at once, with a large stack."""
    pool, all_there = ThreadPoolExecutor(_THREADS, "grammars"), threading.Barrier(_THREADS)
    usual = threading.stack_size(_STACK)
    try:
        wait([pool.submit(all_there.wait) for _ in range(_THREADS)])
    finally:
        threading.stack_size(usual)
    return pool


@cache
def limits() -> LLParserLimits:
    """How much work a grammar may make, here and in replicas, where all answers wait for the masks of each."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=_LEXER_WORK, max_lexer_states=_LEXER_STATES, verbose_errors=False)


def read(text: str, param: str) -> Any:
    """The JSON of a schema that was sent as text. Raises RequestError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(param, f"it is no JSON: {error}") from None


def json_object(param: str) -> str:
    """Any JSON object."""
    return json_schema({"type": "object"}, param)


def json_schema(schema: Json | bool, param: str) -> str:
    """JSON of this schema. Raises RequestError that names the place of what is wrong in it, below `param`."""
    try:
        schema_demands.check(schema)
        grammar = _of_schema(schema)
    except (ValueError, RecursionError) as error:
        raise _refused(param, str(error)) from None
    if problem := _problem(grammar):
        place = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in _place(schema, problem))
        raise _refused(param + place, problem)
    return _followed(grammar, param)


def regex(pattern: str, param: str) -> str:
    """Text that `pattern` matches as a whole. Raises RequestError."""
    from llguidance import LLMatcher

    if len(pattern) > _LONGEST_PATTERN:
        raise _refused(param, f"it has {len(pattern)} characters; a pattern may have {_LONGEST_PATTERN}")
    return _checked(LLMatcher.grammar_from_regex(pattern), param)


def choice(texts: Sequence[str], param: str) -> str:
    """One of `texts`."""
    return rules("start: " + " | ".join(map(json.dumps, texts)), param)


def lark(text: str, param: str) -> str:
    """Text of a client's grammar, as Lark or GBNF writes it. Raises RequestError."""
    if len(text) > _LONGEST_GRAMMAR:
        raise _refused(param, f"it has {len(text)} characters; a grammar may have {_LONGEST_GRAMMAR}")
    patterns = sum(len(found) for found in _LITERAL.findall(text) if found[0] == "/" != found[1:2])
    if patterns > _LONGEST_PATTERN:
        raise _refused(param, f"its patterns have {patterns} characters; all together may have {_LONGEST_PATTERN}")
    if (nests := len(_NESTS.findall(_LITERAL.sub("", text)))) > _MOST_NESTS:
        raise _refused(param, f"it has {nests} rules, brackets and operators; {_MOST_NESTS} at most")
    return rules(text, param)


def rules(text: str, param: str) -> str:
    """Text of a grammar that we write, which may be longer. Raises RequestError."""
    from llguidance import grammar_from

    embedded = (json.JSONDecoder().raw_decode(text, found.end())[0] for found in _EMBEDDED.finditer(text))
    try:
        for schema in embedded:
            schema_demands.check(schema)
        schema_demands.check_patterns(_LITERAL.sub("", text).count("&") + 1)
        return _checked(grammar_from("grammar", text), param)
    except (ValueError, RecursionError) as error:
        raise _refused(param, str(error)) from None


def bound_call(name: str, schema: Json) -> str:
    """What of a Lark grammar is a call of the tool `name`, with arguments of `schema`, which was checked."""
    begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f'{begin} %json {json.dumps({**schema, "x-guidance": _SPACE})} "}}"'


def _checked(grammar: str, param: str) -> str:
    if problem := _problem(grammar):
        raise _refused(param, problem)
    return _followed(grammar, param)


def _followed(grammar: str, param: str) -> str:
    """`grammar`, which has no mistakes. Raises RequestError if no answer can begin by it, or only with too much work.

    Those that name tokens are tried by replicas alone, which know these.
    """
    error = (_remembered if len(grammar) <= _REMEMBERED else _beginning)(grammar)
    if error:
        raise _refused(param, f"no text fits it, or it takes too much work: repeat and combine less in it ({error})")
    return grammar


def _beginning(grammar: str) -> str | None:
    """Why no answer of bytes can begin by `grammar`, if none can."""
    from llguidance import LLMatcher

    names_tokens, _ = LLMatcher.validate_grammar_with_warnings(grammar, _bytes(), limits=limits())
    if names_tokens:
        return None
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return matcher.get_error().partition("\n")[0][:_LONGEST_ERROR] if matcher.is_error() else None


_remembered = lru_cache(maxsize=256)(_beginning)
"""Clients send the same few grammars again and again."""


@cache
def _bytes() -> LLTokenizer:
    """Each byte is a token."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _of_schema(schema: Json | bool) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_SPACE))


def _problem(grammar: str) -> str | None:
    """What is wrong with `grammar`, None if nothing is."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return messages[0] if failed else None


def _place(schema: Json | bool, problem: str) -> list[str | int]:
    """The way to the innermost part of `schema` that has `problem` by itself."""
    way: list[str | int] = []
    whole = schema if isinstance(schema, dict) else {}
    shared: Json = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    looked_at = 0
    part: Any = schema
    while True:
        for keys, inner in _parts(part):
            looked_at += 1
            if not isinstance(inner, dict):
                continue
            alone = {**shared, **inner} if "$ref" in json.dumps(inner) else inner
            if looked_at <= _MOST_LOOKED_AT and _problem(_of_schema(alone)) == problem:
                way += keys
                part = inner
                break
        else:
            return way


def _parts(schema: Any) -> Iterator[tuple[list[str | int], Any]]:
    if not isinstance(schema, dict):
        return
    for key in _BY_NAME:
        if isinstance(named := schema.get(key), dict):
            for name, inner in named.items():
                yield [key, name], inner
    for key in _ONE:
        if isinstance(inner := schema.get(key), dict):
            yield [key], inner
    for key in _SEVERAL:
        if isinstance(listed := schema.get(key), list):
            for index, inner in enumerate(listed):
                yield [key, index], inner


def _refused(param: str, problem: str) -> RequestError:
    reason = f"{param}: answers cannot be bound to it: {problem.strip()}"
    return RequestError(Outcome.REJECTED, reason, param=param)
