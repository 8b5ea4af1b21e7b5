"""Both protocols over HTTP, with a classifier that needs no model: shapes, limits, keys, and errors that say why."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.tenants import keyed

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Prediction
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.services import Services

INFER = "/v2/models/topics/infer"


class Parrot:
    """Answers with the text itself as its likeliest label."""

    name = "topics"
    labels = ("yes", "no")
    ready = True

    async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
        if parameters.slo_ms == 1:
            raise RequestError(Outcome.SHED, "busy", 1.2)
        return [Prediction([text, "no"][: parameters.top_k], [0.75, 0.25][: parameters.top_k], None) for text in texts]


def client(**options: Any) -> TestClient:
    keys = options.pop("api_keys", ())
    config = GatewayConfig(max_body_mb=0.01, max_texts=3)
    services = Services.of("texts", {"topics": options.pop("classifier", Parrot())})
    return TestClient(
        application(config, services, lambda: {"services": {}}, lambda: b"# nothing\n", tenants=keyed(keys))
    )


def infer(*texts: str, **extra: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}], **extra}


def test_hugging_face_answers_a_list_for_each_text() -> None:
    one = client().post("/models/topics", json={"inputs": "a"})
    two = client().post("/models/topics", json={"inputs": ["a", "b"], "parameters": {"top_k": 1}})
    assert one.json() == [[{"label": "a", "score": 0.75}, {"label": "no", "score": 0.25}]]
    assert two.json() == [[{"label": "a", "score": 0.75}], [{"label": "b", "score": 0.75}]]


def test_open_inference_in_json() -> None:
    answer = client().post(INFER, json=infer("a", "b", id="7", parameters={"top_k": 1})).json()
    assert answer == {
        "model_name": "topics",
        "model_version": "1",
        "id": "7",
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [2, 1], "data": ["a", "b"]},
            {"name": "score", "datatype": "FP32", "shape": [2, 1], "data": [0.75, 0.75]},
        ],
    }


def test_open_inference_in_binary_both_ways() -> None:
    texts = ["ä", "b"]
    tail = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    tensor = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(tail)}}
    outputs = [{"name": "label", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [tensor], "outputs": outputs, "parameters": {"top_k": 1}}).encode()
    answer = client().post(INFER, content=head + tail, headers={"Inference-Header-Content-Length": str(len(head))})
    size = int(answer.headers["Inference-Header-Content-Length"])
    assert answer.content[size:] == tail
    assert json.loads(answer.content[:size])["outputs"][0]["parameters"] == {"binary_data_size": len(tail)}


def test_compressed_bodies_are_read_and_bounded() -> None:
    headers = {"Content-Encoding": "gzip"}
    good = client().post("/models/topics", content=gzip.compress(b'{"inputs": "a"}'), headers=headers)
    bomb = client().post("/models/topics", content=gzip.compress(b'"' + b"a" * 10**7), headers=headers)
    cut = client().post("/models/topics", content=gzip.compress(b'{"inputs": "a"}')[:-9], headers=headers)
    wrong = client().post("/models/topics", content=b"{}", headers=headers)
    odd = client().post("/models/topics", content=b"{}", headers={"Content-Encoding": "zip"})
    two = client().post("/models/topics", content=gzip.compress(b'{"inputs": "a"}') * 2, headers=headers)
    assert [answer.status_code for answer in (good, bomb, cut, wrong, odd, two)] == [200, 413, 400, 400, 415, 400]


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/models/topics", b"", 400, "Invalid JSON"),
        ("/models/topics", b'{"inputs": 7}', 400, "inputs"),
        ("/models/topics", b'{"inputs": []}', 400, "at least one"),
        ("/models/topics", b'{"input": "a"}', 400, "input: unknown; allowed: inputs, parameters, options"),
        ("/models/topics", b'{"inputs": "\xff"}', 400, "invalid unicode"),
        ("/models/topics", b'{"inputs": ["a", "b", "c", "d"]}', 413, "at most 3"),
        ("/models/topics", b'{"inputs": "' + b"a" * 20_000 + b'"}', 413, "larger than 10486 bytes"),
        ("/models/topics", b'{"inputs": "a", "parameters": {"top_k": 0}}', 400, "parameters.top_k: got 0"),
        ("/models/topics", b'{"inputs": "a", "parameters": {"k": 0}}', 400, "parameters.k: unknown; allowed: slo_ms"),
        ("/models/topics", b'{"inputs": "a", "parameters": {"slo_ms": NaN}}', 400, "slo_ms"),
        ("/models/topics", b'{"inputs": "a", "parameters": {"slo_ms": "5"}}', 400, "slo_ms"),
        ("/models/topics", b'{"inputs": "a", "parameters": {"utility": 1.5}}', 400, "utility"),
        ("/models/topics", b'{"inputs": "a", "parameters": {"slo_ms": 1}}', 429, "busy"),
        ("/models/other", b'{"inputs": "a"}', 404, "no model 'other'; there are: topics"),
        ("/v2/models/other/infer", b"{}", 404, "no model 'other'"),
        ("/v2/models/topics/versions/2/infer", b"{}", 404, "no version '2'"),
        (INFER, b"[]", 400, "body"),
        (INFER, b'{"inputs": []}', 400, "exactly one is allowed, named text"),
        (INFER, json.dumps(infer("a", outputs=[{"name": "logits"}])).encode(), 400, "allowed: label, score"),
        (INFER, json.dumps(infer("a", parameters={"priority": 1})).encode(), 400, "priority: unknown; allowed: slo_ms"),
        (INFER, json.dumps(infer("a", parameters={"binary_data_output": 1})).encode(), 400, "binary_data_output"),
        (INFER, json.dumps(infer("a", "b", "c", "d")).encode(), 413, "at most 3"),
        (INFER, json.dumps(infer("a", "b")).replace("[2]", "[3]").encode(), 400, "got [3] for 2 texts"),
        (INFER, json.dumps(infer("a")).replace("BYTES", "FP32").encode(), 400, "datatype: got 'FP32'"),
        (INFER, json.dumps(infer("a")).replace("[1]", "[1, 1, 1]").encode(), 400, "allowed: [n] or [n, 1]"),
        ("/nothing", b"{}", 404, "POST /nothing: Not Found"),
    ],
)
def test_bad_requests_are_told_why(path: str, body: bytes, status: int, reason: str) -> None:
    answer = client().post(path, content=body)
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("header", "tail", "reason"),
    [
        ("x", b"", "Inference-Header-Content-Length: got 'x'"),
        ("999999", b"", "Inference-Header-Content-Length: got '999999'"),
        ("1" * 5000, b"", "Inference-Header-Content-Length: got '111"),
        (None, b"\x01\x00\x00", "ends within an element"),
        (None, b"\x09\x00\x00\x00a", "ends within an element"),
        (None, b"\x01\x00\x00\x00\xff", "not UTF-8"),
    ],
)
def test_bad_binary_tensors_are_told_why(header: str | None, tail: bytes, reason: str) -> None:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": header or str(len(head))}
    answer = client().post(INFER, content=head + tail, headers=headers)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]


def test_shed_requests_are_told_when_to_come_back() -> None:
    answer = client().post("/models/topics", json={"inputs": "a", "parameters": {"slo_ms": 1}})
    assert answer.headers["Retry-After"] == "2"


def test_wrong_method() -> None:
    answer = client().get("/models/topics")
    assert answer.status_code == 405
    assert answer.json() == {"error": "GET /models/topics: Method Not Allowed"}


def test_health_and_metadata() -> None:
    http = client()
    assert http.get("/v2/health/live").status_code == 200
    assert http.get("/v2/health/ready").status_code == 200
    assert http.get("/v2/models/topics/versions/1/ready").json() == {"name": "topics", "ready": True}
    assert http.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    assert http.get("/v2/models/topics").json()["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]


def test_not_ready_is_503() -> None:
    classifier = Parrot()
    classifier.ready = False
    http = client(classifier=classifier)
    assert http.get("/v2/health/live").status_code == 200
    for path in ("/v2/health/ready", "/v2/models/topics/ready"):
        assert http.get(path).status_code == 503
        assert "not ready yet" in http.get(path).json()["error"]


def test_api_keys() -> None:
    http = client(api_keys=["one", "two"])
    assert http.get("/v2/health/ready").status_code == 200
    assert http.get("/v1/models/x/v2/health/ready").status_code == 401
    for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "two"}):
        refused = http.post("/models/topics", json={"inputs": "a"}, headers=headers)
        assert refused.status_code == 401
        assert "Authorization: Bearer KEY" in refused.json()["error"]
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        assert http.post("/models/topics", json={"inputs": "a"}, headers=headers).status_code == 200
