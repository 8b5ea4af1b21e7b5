"""What strangers send: bodies that are nearly right, or large in one place, or broken in their bytes.

Strategies are aware of size: what is large is drawn as a unit and a count, so that hypothesis draws no more for it, and
megabytes are as likely in any place of a body as a few bytes.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from PIL import Image

MOST_BYTES = 4 * 2**20
"""As the gateway is configured: what is larger is refused by its length."""
HEADER = "Inference-Header-Content-Length"

Draw = Callable[..., Any]


class Request(NamedTuple):
    """`path` as the OpenAPI document has it, or None, and filled in."""

    method: str
    route: str | None
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}


class Many(NamedTuple):
    """A list of `unit`, so many `times`, or if `keys` an object of so many keys."""

    unit: Any
    times: int
    keys: bool = False

    def dump(self) -> bytes:
        unit = dump(self.unit)
        count = min(self.times, MOST_BYTES // (len(unit) + (11 if self.keys else 1)))
        if self.keys:
            return b"{" + b",".join(b'"%07d":%s' % (index, unit) for index in range(count)) + b"}"
        return b"[" + b",".join([unit] * count) + b"]"


def dump(value: Any) -> bytes:
    """`value` as JSON."""
    if isinstance(value, Many):
        return value.dump()
    if isinstance(value, Mapping):
        return b"{" + b",".join(dump(str(key)) + b":" + dump(each) for key, each in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(dump, value)) + b"]"
    return json.dumps(value).encode()


COUNTS = st.sampled_from([0, 1, 2, 3, 17, 65, 1_000, 1_000]) | st.sampled_from([10_000, 70_000, 300_000, 2_000_000])
SHORT = st.one_of(
    st.sampled_from(["", "a", "é", "😀", "\0", "a ", "[", '"', "\\", "<|end|>", "<|start|>system\n", "word, "]),
    st.text(max_size=5),
)
TEXTS = SHORT | st.builds(lambda unit, count: (unit * count)[:MOST_BYTES], SHORT, COUNTS)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 10**300, 0.5, 1e308, float("nan"), float("inf")])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | st.integers().map(lambda digits: digits)
UNITS: st.SearchStrategy[Any] = st.sampled_from(
    [[], {}, 0, "", [0], [[]], {"a": 0}, None, 0.123456, "a", {"role": "user", "content": ""}]
)
LARGE = st.builds(Many, UNITS, COUNTS, st.booleans())
DEEP = st.builds(lambda depth: json.loads("[" * depth + "]" * depth), st.sampled_from([1, 5, 150, 250]))
VALUES = st.recursive(
    LEAVES | LARGE | DEEP,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=5,
)


def _tensor(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data, "parameters": {}}]}


def picture(form: str = "PNG", size: tuple[int, int] = (20, 16)) -> bytes:
    """An image of noise."""
    into = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(noise).save(into, form)
    return into.getvalue()


PICTURES = [picture(form) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP")]
_BASE64 = base64.b64encode(PICTURES[0]).decode()
_TALK = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
_CLASSIFY = {"inputs": ["a b", "c"], "parameters": {"top_k": 1, "slo_ms": 60_000, "utility": 1}}
_RERANK = {"model": "scores", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}
_PAIR = {"inputs": [_tensor(name, "BYTES", [1], ["a"])["inputs"][0] for name in ("text", "text_pair")]}
_PIXELS = np.zeros((1, 16, 16, 3), int).tolist()
GENERATE = {"max_tokens": 4, "temperature": 0, "seed": 1, "n": 1, "stop": ["x"], "stream": False, "user": "u"}
SAMPLE = {
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "min_p": 0.1,
    "typical_p": 0.9,
    "min_tokens": 1,
    "bad_words": ["a", "b c"],
    "stop_token_ids": [7],
}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
_FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": _SCHEMA, "strict": True}}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}], "summary": []},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "d"},
]
BODIES: Sequence[tuple[str, Mapping[str, str], Any]] = (
    ("/models/{model}", {"model": "small"}, _CLASSIFY),
    ("/models/{model}", {"model": "large"}, {"inputs": "a"}),
    ("/models/{model}", {"model": "both"}, {**_CLASSIFY, "parameters": {"details": True}}),
    ("/models/{model}", {"model": "digits"}, {"inputs": [_BASE64], "parameters": {"task": "model", "slo_ms": 60_000}}),
    ("/models/{model}", {"model": "scores"}, {"inputs": [{"text": "a", "text_pair": "b"}, "c"]}),
    ("/models/{model}", {"model": "entities"}, {"inputs": ["a b"], "parameters": {"aggregation_strategy": "first"}}),
    ("/models/{model}", {"model": "vectors"}, {"inputs": ["a"], "normalize": True, "dimensions": 4, "truncate": True}),
    ("/models/{model}", {"model": "vectors"}, {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}),
    ("/v1/embeddings", {}, {"model": "vectors", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4}),
    ("/v1/embeddings", {}, {"model": "vectors", "input": [[1, 2], [3]], "prompt_name": "query", "slo_ms": 60_000}),
    ("/rerank", {}, _RERANK),
    ("/v1/rerank", {}, {**_RERANK, "model": "vectors"}),
    ("/v2/rerank", {}, _RERANK),
    ("/score", {}, {"model": "scores", "text_1": ["a", "b"], "text_2": ["c", "d"]}),
    ("/v1/score", {}, {"model": "vectors", "text_1": "a", "text_2": ["b", "c"], "utility": 1}),
    ("/classify", {}, {"model": "small", "input": ["a", "b"]}),
    ("/v2/models/{model}/infer", {"model": "vectors"}, _tensor("text", "BYTES", [2], ["a", "b"])),
    ("/v2/models/{model}/infer", {"model": "entities"}, _tensor("text", "BYTES", [1, 1], [["a b"]])),
    ("/v2/models/{model}/infer", {"model": "scores"}, _PAIR),
    ("/v2/models/{model}/infer", {"model": "small"}, {**_tensor("text", "BYTES", [2], ["a", "b"]), "id": "7"}),
    (
        "/v2/models/{model}/versions/{version}/infer",
        {"model": "both", "version": "1"},
        {**_tensor("text", "BYTES", [1, 1], [["a"]]), "outputs": [{"name": "level", "parameters": {}}]},
    ),
    ("/v2/models/{model}/infer", {"model": "digits"}, _tensor("image", "UINT8", [1, 16, 16, 3], _PIXELS)),
    ("/v2/models/{model}/infer", {"model": "digits"}, _tensor("image", "FP32", [1, 2, 2, 3], [0.5] * 12)),
    ("/v2/models/{model}/infer", {"model": "digits"}, _tensor("image", "BYTES", [1], [_BASE64])),
    ("/v1/completions", {}, {"model": "chat", "prompt": "a", **GENERATE}),
    ("/v1/completions", {}, {"model": "chat", "prompt": [[1, 2], [3]], "logprobs": 2, **GENERATE}),
    ("/v1/completions", {}, {"model": "chat", "prompt": ["a", "b"], "echo": True, "stream": True, "max_tokens": 2}),
    ("/v1/completions", {}, {"model": "chat", "prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/chat/completions", {}, {"model": "chat", "messages": _TALK, **GENERATE}),
    ("/v1/chat/completions", {}, {"model": "chat", "messages": _TALK, "prompt_logprobs": 1, **GENERATE}),
    (
        "/v1/chat/completions",
        {},
        {
            "model": "chat",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"}],
            "logprobs": True,
            "top_logprobs": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 2,
        },
    ),
    ("/v1/completions", {}, {"model": "chat", "prompt": "a", **GENERATE, **SAMPLE, "guided_choice": ["a", "b"]}),
    ("/v1/completions", {}, {"model": "chat", "prompt": "a", "structured_outputs": {"regex": "a+"}, "max_tokens": 2}),
    ("/v1/chat/completions", {}, {"model": "chat", "messages": _TALK, **GENERATE, "response_format": _FORM}),
    ("/v1/responses", {}, {"model": "chat", "input": "a", "instructions": "x", "max_output_tokens": 4}),
    ("/v1/responses", {}, {"model": "chat", "input": _ITEMS, "stream": True, "max_output_tokens": 2}),
    ("/v2/repository/index", {}, {"ready": True}),
    ("/tokenize", {}, {"prompt": "a", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {}, {"model": "chat", "messages": _TALK}),
    ("/detokenize", {}, {"model": "chat", "tokens": [1, 2]}),
    ("/v1/load_lora_adapter", {}, {"lora_name": "x", "lora_path": "x", "load_inplace": True}),
    ("/v1/unload_lora_adapter", {}, {"lora_name": "x"}),
    (
        "/v2/repository/models/{model}/tasks/{task}/load",
        {"model": "digits", "task": "x"},
        {"parameters": {"path": "x", "replace": True}},
    ),
)
"""A right body of each route, and what fills its path."""
PAGES = (
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v1/models", "/stats", "/metrics", "/openapi.json"),
    *("/health", "/ping", "/version"),
    *("/v2/models/{model}", "/v2/models/{model}/ready", "/v2/models/{model}/versions/{version}", "/v1/models/{model}"),
    *("/v2/repository/models/{model}/tasks", "/v2/models/{model}/versions/{version}/ready"),
    "/v2/repository/models/{model}/tasks/{task}/unload",
)
NAMES = st.sampled_from(
    ["small", "both", "vectors", "entities", "chat", "digits", "x", "1", "%00", "..", "a%2Fb", "%ff", "é"]
)


def _changed(draw: Draw, value: Any) -> Any:
    """`value` with something else somewhere in it."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        how = draw(st.integers(0, 9))
        if how == 0:
            return {other: each for other, each in value.items() if other != key}
        if how == 1:
            return {**value, draw(SHORT): draw(VALUES)}
        return {**value, key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 2)):
        at = draw(st.integers(0, len(value) - 1))
        if draw(st.integers(0, 3)) == 0:
            return Many(value[at], draw(COUNTS))
        return [*value[:at], _changed(draw, value[at]), *value[at + 1 :]]
    return draw(VALUES)


def damaged(draw: Draw, content: bytes) -> bytes:
    """`content` with some bytes lost, changed, or put in."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        how, some = draw(st.integers(0, 3)), draw(st.binary(min_size=1, max_size=8))
        if how == 0:
            content = content[:at]
        elif how == 1:
            content = content[:at] + some + content[at + len(some) :]
        elif how == 2:
            content = content[:at] + some * draw(st.sampled_from([1, 100, 100_000])) + content[at:]
        else:
            content = content[:at] + content[at + draw(st.integers(1, 100)) :]
    return content[:MOST_BYTES]


@st.composite
def json_requests(draw: Draw) -> Request:
    """Bodies in JSON, some of them right."""
    route, fill, body = draw(st.sampled_from(BODIES))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        body = _changed(draw, body)
    content = dump(body)
    if draw(st.integers(0, 7)) == 0:
        content = damaged(draw, content)
    headers = {}
    if draw(st.integers(0, 15)) == 0:
        headers["Content-Encoding"] = draw(st.sampled_from(["gzip", "deflate", "br", "identity"]))
        content = gzip.compress(content, 1) if draw(st.booleans()) else content
    if draw(st.integers(0, 15)) == 0:
        headers[HEADER] = str(draw(st.sampled_from([0, 1, len(content), 2**64, "x", "", "-1"])))
    return Request("POST", route, route.format(**fill), content, headers)


@st.composite
def binary_requests(draw: Draw) -> Request:
    """Tensors behind the JSON: texts, images or pixels, of shapes that may be others."""
    name = draw(st.sampled_from(["text", "image"]))
    datatype = draw(st.sampled_from(["BYTES", "UINT8", "FP32", "INT8"]))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 16, 64, 1_000, 2**62]), max_size=5))
    elements = st.binary(max_size=20) | st.sampled_from(PICTURES)
    tail = b"".join(struct.pack("<I", len(each)) + each for each in draw(st.lists(elements, max_size=3)))
    tail = (tail + draw(st.binary(max_size=8)) * draw(COUNTS))[: MOST_BYTES - 1_000]
    tensor = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(tail)}}
    head = dump({"inputs": [tensor], "outputs": [{"name": "label", "parameters": {"binary_data": True}}]})
    if draw(st.integers(0, 3)) == 0:
        tail = damaged(draw, tail)
    path = f"/v2/models/{'small' if name == 'text' else 'digits'}/infer"
    return Request("POST", "/v2/models/{model}/infer", path, head + tail, {HEADER: str(len(head))})


@st.composite
def image_requests(draw: Draw) -> Request:
    """Files of images that are damaged, or say of themselves that they are enormous."""
    content = draw(st.sampled_from(PICTURES))
    if content[:4] == b"\x89PNG" and draw(st.booleans()):
        sides = struct.pack(">II", *draw(st.tuples(*[st.sampled_from([0, 1, 5_000, 30_000, 2**31 - 1])] * 2)))
        content = content[:16] + sides + content[24:]
    else:
        content = damaged(draw, content)
    return Request("POST", "/models/{model}", "/models/digits?slo_ms=60000", content)


@st.composite
def page_requests(draw: Draw) -> Request:
    """Everything that has no body, and paths and methods that there are not."""
    route = draw(st.sampled_from(PAGES) | st.sampled_from([route for route, _, _ in BODIES]))
    path = route
    for part in ("{model}", "{version}", "{task}"):
        path = path.replace(part, draw(NAMES))
    known = route in PAGES and route != "/openapi.json"
    return Request(draw(st.sampled_from(["GET", "POST", "PUT", "HEAD"])), route if known else None, path)
