"""Two hundred malformed bodies: each is refused with a reason, and the cluster goes on serving."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.waiting import HANGS_AFTER_S

from e2e.cluster import Cluster

NEEDS = ("topics", "digits")
PATHS = st.sampled_from(
    [
        "/models/topics",
        "/v2/models/topics/infer",
        "/v2/models/topics/versions/1/infer",
        "/models/digits?task=digit&slo_ms=1000000",
        "/v2/models/digits/infer",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
NOT_TEXT = JSON.filter(lambda value: not isinstance(value, str) and not all_texts(value))
TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}


def all_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def almost_hugging_face(draw: st.DrawFn) -> Any:
    wrong = draw(st.sampled_from(["inputs", "parameters", "top_k", "slo_ms", "extra"]))
    if wrong == "inputs":
        return {"inputs": draw(NOT_TEXT)}
    if wrong == "extra":
        return {"inputs": "a", "x" + draw(st.text(max_size=4)): draw(JSON)}
    bad = draw(JSON.filter(lambda value: not isinstance(value, dict)).filter(lambda value: not number(value)))
    if wrong == "parameters":
        return {"inputs": "a", "parameters": bad}
    return {"inputs": "a", "parameters": {wrong: bad if bad is not None else "1"}}


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def almost_open_inference(draw: st.DrawFn) -> Any:
    key = draw(st.sampled_from(["name", "shape", "datatype", "data"]))
    value = draw(JSON.filter(lambda value: value not in ("text", "BYTES") and not all_texts(value)))
    return {"inputs": [{**TENSOR, key: value}]}


@st.composite
def malformed(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body that no protocol allows there, and headers."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return draw(PATHS), b"\x00" + draw(st.binary(max_size=64)), {}
    if kind == 1:
        return draw(PATHS), json.dumps(draw(JSON)).encode(), {}
    if kind == 2:
        return "/models/topics", json.dumps(almost_hugging_face(draw)).encode(), {}
    if kind == 3:
        return "/v2/models/topics/infer", json.dumps(almost_open_inference(draw)).encode(), {}
    size = draw(st.integers(0, 80))
    tensor = {**TENSOR, "data": None, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    tail = draw(st.binary(min_size=1, max_size=64).filter(lambda tail: tail[:4] != b"\x00\x00\x00\x00"))
    length = draw(st.sampled_from([str(len(head)), str(len(head) - 1), "-1", "many"]))
    return "/v2/models/topics/infer", head + b"\xff\xff\xff\xff" + tail, {"Inference-Header-Content-Length": length}


def test_malformed_bodies_are_refused_with_a_reason(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.address, timeout=HANGS_AFTER_S) as http:

        @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(malformed())
        def refused(request: tuple[str, bytes, dict[str, str]]) -> None:
            path, body, headers = request
            answer = http.post(path, content=body, headers=headers)
            assert 400 <= answer.status_code < 500, (request, answer.text)
            assert answer.json()["error"], request

        refused()
    assert cluster.classify("still serving").status_code == 200
