"""What a JSON body may hold, whatever its bytes: counted as a parser would, without parsing."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pliant.deployments.http import body
from pliant.deployments.http.body import MOST_NESTED, MOST_VALUES, check_json
from pliant.deployments.http.hugging_face_texts import TextClassificationRequest
from pliant.deployments.http.openai_schemas import ChatRequest, CompletionRequest, parsed
from pliant.deployments.http.parameters import validated_json
from pliant.deployments.http.tensors import InferRequest
from pliant.deployments.serving.outcome import Fault, RequestError

TEXT = st.text(st.sampled_from('ab,[]{}:"\\ é'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda each: st.lists(each, max_size=6) | st.dictionaries(TEXT, each, max_size=6),
    max_leaves=40,
)
LARGE = 4 * 2**20
MOST_BYTES = 64 * 2**20


def containers(of: Any) -> list[Any]:
    """All lists and objects in it."""
    inner = of.values() if isinstance(of, dict) else of if isinstance(of, list) else ()
    found = [each for item in inner for each in containers(item)]
    return [of, *found] if isinstance(of, list | dict) else found


def refused(content: bytes) -> bool:
    try:
        check_json(content)
    except RequestError as error:
        return error.fault is Fault.TOO_LARGE
    return False


@given(JSON, st.integers(0, 20), st.integers(0, 20), st.booleans())
@example({":": None, ",": None, "[": "", ":::": None, "": "", "::": ""}, 0, 7, False)
def test_values_count_wherever_strings_end(of: Any, most: int, most_nested: int, ascii_only: bool) -> None:
    content = json.dumps(of, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MOST_VALUES", 1 + most + most_nested)
        patch.setattr(body, "MOST_NESTED", most_nested)
        told = refused(content)
    found = containers(of)
    values = 1 + sum(max(1, len(each)) for each in found)  # an empty one counts as if it had a value
    nested = len(found) + sum(len(each) for each in found if isinstance(each, dict))
    assert told == (values > 1 + most + most_nested or nested > most_nested)


def filled(head: bytes, unit: bytes, tail: bytes, most: int = LARGE) -> bytes:
    """As many `unit` as there is room for, with commas."""
    count = min(most, (LARGE - len(head) - len(tail)) // (len(unit) + 1))
    return head + b",".join([unit] * count) + tail


HF, CHAT = b'{"inputs":[', b'{"model":"chat","messages":['
DATA = b'{"inputs":[{"name":"image","shape":[1],"datatype":"UINT8","data":['
KEYS = b",".join(b'"%06d":0' % index for index in range(300_000))
LARGEST: list[tuple[Any, bytes]] = [
    (TextClassificationRequest, filled(HF, b"[]", b"]}")),
    (TextClassificationRequest, filled(HF, b"{}", b"]}")),
    (TextClassificationRequest, filled(HF, b"{}", b"]}", MOST_NESTED - 10)),
    (TextClassificationRequest, filled(HF, b'""', b"]}", MOST_VALUES - 10)),
    (TextClassificationRequest, b'{"inputs":"","options":{' + KEYS + b"}}"),
    (TextClassificationRequest, b'{"inputs":"' + b"a" * LARGE),
    (TextClassificationRequest, b'{"inputs":"' + "é".encode() * (LARGE // 2 - 10) + b'"}'),
    (TextClassificationRequest, b'{"inputs":"' + b'\\",' * (LARGE // 3 - 10) + b'"}'),
    (TextClassificationRequest, b'"' * LARGE),
    (TextClassificationRequest, b"[" * LARGE),
    (TextClassificationRequest, b'{"a":' * (MOST_NESTED // 3)),
    (InferRequest, filled(DATA, b"[0]", b"]}]}")),
    (InferRequest, filled(DATA, b"[0]", b"]}]}", MOST_NESTED - 10)),
    (InferRequest, filled(DATA, b"0.12345", b"]}]}", MOST_VALUES - 10)),
    (ChatRequest, filled(CHAT, b'{"role":"user","content":""}', b"]}")),
    (ChatRequest, filled(CHAT, b'{"role":"user","content":""}', b"]}", MOST_NESTED // 4)),
    (ChatRequest, filled(CHAT, b"{}", b"]}", MOST_NESTED - 10)),
    (ChatRequest, b"{" + KEYS[: 10 * MOST_NESTED - 100].rpartition(b",")[0] + b"}"),
    (CompletionRequest, filled(b'{"model":"chat","prompt":[', b"0", b"]}", MOST_VALUES - 10)),
    (CompletionRequest, filled(b'{"model":"chat","prompt":[', b"[]", b"]}", MOST_NESTED - 10)),
    (CompletionRequest, filled(b'{"model":"chat","prompt":[', b"9" * 4000, b"]}")),
]


@pytest.mark.parametrize(("model", "content"), LARGEST, ids=[str(index) for index in range(len(LARGEST))])
def test_no_body_makes_much_of_its_bytes(model: Any, content: bytes) -> None:
    parse = parsed if model in (ChatRequest, CompletionRequest) else validated_json
    tracemalloc.start()
    try:
        with suppress(RequestError):
            parse(model, content)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES


@pytest.mark.parametrize("content", [filled(HF, b"{}", b"]}"), b'{"inputs":"",' + KEYS + b"}"])
def test_what_a_parser_would_make_too_much_of_never_reaches_it(content: bytes) -> None:
    assert refused(content)


@pytest.mark.parametrize("inner", [b"a, b", b"[[[{{{", b'\\"', b"\\\\", b'\\\\\\",[', "é,".encode()])
def test_a_long_text_may_hold_anything(inner: bytes) -> None:
    content = b'{"inputs":"' + inner * (LARGE // len(inner) - 20) + b'"}'
    assert json.loads(content)
    assert not refused(content)


def test_of_many_mistakes_their_number_is_told() -> None:
    wrong = b'{"inputs":"a",' + b",".join(b'"%d":0' % index for index in range(5_000)) + b"}"
    with pytest.raises(RequestError, match="body: 5000 of its keys and values are wrong; known keys: inputs, param"):
        validated_json(TextClassificationRequest, wrong)
    with pytest.raises(RequestError, match=r"body: 5002 of its keys .*; known keys: model, messages, "):
        parsed(ChatRequest, b"{" + wrong.removeprefix(b'{"inputs":"a",'))
