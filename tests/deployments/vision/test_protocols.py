"""Images over HTTP: both protocols with their own clients' messages, tasks at run time, and errors that say why."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from huggingface_hub import ImageClassificationOutputElement
from huggingface_hub.inference._providers import get_provider_helper
from PIL import Image
from support.images import encoded
from support.scripted_vision import INFO, Replicas, TaskPlanner, report, service, task
from support.tenants import keyed

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.services import Services
from pliant.deployments.serving.status import exposition
from pliant.deployments.vision.kind import KIND
from pliant.deployments.vision.report import GammaReport

INFER, CLASSIFY = "/v2/models/digits/infer", "/models/digits"
SHAPE = (INFO.height, INFO.width, 3)


def picture(shade: int = 255) -> bytes:
    return encoded(Image.new("RGB", (20, 16), (shade,) * 3))


def pixels(*shades: int, dtype: Any = np.uint8) -> Any:
    return np.stack([np.full(SHAPE, shade, dtype=dtype) for shade in shades])


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def tensor(data: Any, datatype: str = "UINT8", shape: Any = None, **parameters: Any) -> dict[str, Any]:
    listed = data.tolist() if isinstance(data, np.ndarray) else data
    found = shape or (list(data.shape) if isinstance(data, np.ndarray) else [len(data)])
    return {
        "inputs": [{"name": "image", "shape": found, "datatype": datatype, "data": listed}],
        "parameters": parameters,
    }


PATIENT_MS = 600_000
"""An slo_ms that no machine misses."""


@asynccontextmanager
async def gateway(replicas: Replicas | None = None, *entries: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    vision, _, follower = service(replicas, TaskPlanner(*(entries or [task()])), slo_ms=PATIENT_MS)
    config = GatewayConfig(max_body_mb=0.1, max_texts=3)
    services = Services.of("images", {"digits": vision})
    routers = KIND.routers(services, follower, config)
    app = application(config, services, dict, bytes, routers, keyed(options.pop("api_keys", ())))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pliant") as http:
        yield http


@pytest.mark.parametrize("parameters", [{}, {"top_k": 1}, {"top_k": 2, "function_to_apply": "sigmoid"}])
async def test_the_hugging_face_client(parameters: dict[str, Any]) -> None:
    url = f"http://pliant{CLASSIFY}?task=parity&slo_ms=60000"
    helper = get_provider_helper("hf-inference", task="image-classification", model=url)
    call = helper.prepare_request(inputs=picture(), parameters=parameters, headers={}, model=url, api_key="none")
    replicas = Replicas()
    async with gateway(replicas, task(), task("large")) as http:
        answer = await http.post(call.url, content=bytes(call.data), headers=call.headers)
    assert answer.status_code == 200, answer.text
    elements = ImageClassificationOutputElement.parse_obj_as_list(answer.content)
    assert [element.label for element in elements] == ["even", "odd"][: parameters.get("top_k")]
    assert elements[0].score > 0.5
    assert (elements[0].gamma, elements[0].fate) == (-4, "in_time")
    assert 30 < replicas.queries[0].budget_s < 60


async def test_large_requests_and_answers() -> None:
    labels = tuple(map(str, range(2_000)))
    noise = np.random.default_rng(0).integers(0, 256, (150, 150, 3), np.uint8)
    image = encoded(Image.fromarray(noise), compress_level=0)
    async with gateway(None, task(labels=labels)) as http:
        answer = await http.post(CLASSIFY, json={"inputs": [b64(image)]})
        assert [len(each) for each in answer.json()] == [2_000]
        answer = await http.post(CLASSIFY, json={"inputs": [b64(picture())] * 3})
        assert [len(each) for each in answer.json()] == [2_000] * 3
        answer = await http.post(INFER, json=tensor(pixels(0, 1, 2)))
    assert answer.json()["outputs"][0]["shape"] == [3, 2_000]


async def test_json_parameters_go_before_the_url() -> None:
    async with gateway(None, task(), task("large")) as http:
        body = {"inputs": [b64(picture()), b64(picture(0))], "parameters": {"task": "parity", "top_k": 1}}
        answer = await http.post(f"{CLASSIFY}?task=large", json=body)
    assert [[element["label"] for element in each] for each in answer.json()] == [["even"], ["odd"]]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", ["UINT8", "FP32", "BYTES"])
@pytest.mark.parametrize("channels_first", [True, False])
async def test_tritons_client(binary: bool, datatype: str, channels_first: bool) -> None:
    if datatype == "BYTES":
        encoded = [picture(), picture(0)] if binary else [b64(picture()).encode(), b64(picture(0)).encode()]
        images = np.array(encoded, dtype=np.object_).reshape(2, 1)[:, : None if channels_first else 1]
    else:
        images = pixels(255, 0) if datatype == "UINT8" else pixels(1, 0, dtype=np.float32)
        images = images.transpose(0, 3, 1, 2) if channels_first else images
    given = triton.InferInput("image", list(images.shape), datatype)
    given.set_data_from_numpy(np.ascontiguousarray(images), binary_data=binary)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("label", "score", "gamma", "fate")]
    body, size = triton.InferenceServerClient.generate_request_body(
        [given], outputs=outputs, parameters={"task": "parity", "top_k": 1, "utility": 0.5}
    )
    replicas = Replicas()
    async with gateway(replicas) as http:
        headers = {} if size is None else {"Inference-Header-Content-Length": str(size)}
        answer = await http.post(INFER, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    length = answer.headers.get("Inference-Header-Content-Length")
    result = triton.InferenceServerClient.parse_response_body(
        answer.content, header_length=None if length is None else int(length)
    )
    label, fate = (np.asarray(result.as_numpy(name)).ravel().tolist() for name in ("label", "fate"))
    assert [text.decode() if isinstance(text, bytes) else text for text in label] == ["even", "odd"]
    assert [text.decode() if isinstance(text, bytes) else text for text in fate] == ["in_time"] * 2
    assert result.as_numpy("gamma").tolist() == [[-4], [-4]]
    assert result.as_numpy("score").shape == (2, 1)
    assert [query.utility for query in replicas.queries] == [0.5, 0.5]


async def test_metadata_and_readiness() -> None:
    async with gateway(None, task(), task("large", ("small", "big"))) as http:
        await http.post(CLASSIFY, json={"inputs": b64(picture()), "parameters": {"task": "parity"}})
        metadata = (await http.get("/v2/models/digits")).json()
        assert metadata["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 8, 8, 3]}]
        assert metadata["parameters"]["tasks"] == "large,parity"
        assert metadata["parameters"]["labels.large"] == "small,big"
        assert (await http.get("/v2/models/digits/ready")).status_code == 200
        assert (await http.get("/v2/health/ready")).status_code == 200


async def test_tasks_come_and_go() -> None:
    tasks = "/v2/repository/models/digits/tasks"
    async with gateway() as http:
        missing = await http.post(CLASSIFY, json={"inputs": b64(picture()), "parameters": {"task": "large"}})
        assert missing.status_code == 404
        loaded = await http.post(f"{tasks}/large/load", json={"parameters": {"path": "/tasks/large"}})
        assert (loaded.status_code, loaded.json()["name"], loaded.json()["labels"]) == (200, "large", ["even", "odd"])
        answer = await http.post(CLASSIFY, json={"inputs": b64(picture()), "parameters": {"task": "large"}})
        assert answer.status_code == 200
        assert [card["name"] for card in (await http.get(tasks)).json()] == ["large", "parity"]
        assert (await http.post(f"{tasks}/large/unload")).status_code == 200
        gone = await http.post(CLASSIFY, json={"inputs": b64(picture()), "parameters": {"task": "large"}})
        assert gone.status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("digits/tasks/x/load", {}, 400, "parameters: Field required"),
        ("digits/tasks/x/load", {"parameters": {"path": ""}}, 400, "parameters.path: got ''"),
        (
            "digits/tasks/x/load",
            {"parameters": {"path": "/tasks/x", "y": 1}},
            400,
            "y: unknown; allowed: path, replace",
        ),
        ("digits/tasks/x/load", {"parameters": {"path": "/etc"}}, 403, "lies outside"),
        ("other/tasks/x/load", {"parameters": {"path": "/tasks/x"}}, 404, "no model 'other'; there are: digits"),
        ("digits/tasks/x/unload", {}, 404, "digits has no 'x'"),
    ],
)
async def test_tasks_that_cannot_be_loaded(path: str, body: Any, status: int, reason: str) -> None:
    async with gateway() as http:
        answer = await http.post(f"/v2/repository/models/{path}", json=body)
    assert answer.status_code == status
    assert reason in answer.json()["error"]


BAD: list[tuple[str, Any, int, str]] = [
    (CLASSIFY, b"", 400, "has no bytes"),
    (CLASSIFY, b"hello", 415, "no image of PNG, JPEG"),
    (CLASSIFY, picture()[:60], 400, "cannot be decoded"),
    (CLASSIFY, b"x" * 200_000, 413, "larger than 104858 bytes"),
    (f"{CLASSIFY}?top=1", picture(), 400, "in the URL: top: unknown; allowed: task, slo_ms, utility, top_k"),
    (f"{CLASSIFY}?top_k=many", picture(), 400, "in the URL: top_k: got 'many'"),
    (f"{CLASSIFY}?task=x", picture(), 404, "digits has no task 'x'; there are: parity"),
    (CLASSIFY, {"inputs": "&&&"}, 400, "an image is not base64"),
    (CLASSIFY, {"inputs": b64(b"hello")}, 415, "no image of"),
    (CLASSIFY, {"inputs": []}, 400, "got no image; send at least one"),
    (CLASSIFY, {"inputs": ["", "", "", ""]}, 413, "4 images in one request; at most 3 are allowed"),
    (CLASSIFY, {"inputs": 7}, 400, "inputs"),
    (CLASSIFY, {"inputs": "", "parameters": {"tusk": 1}}, 400, "parameters.tusk: unknown; allowed: task, slo_ms"),
    (CLASSIFY, {"inputs": "", "parameters": {"utility": 0}}, 400, "parameters.utility: got 0"),
    (CLASSIFY, {"inputs": "", "parameters": {"slo_ms": -1}}, 400, "parameters.slo_ms: got -1"),
    (INFER, {"inputs": []}, 400, "exactly one is allowed, named image"),
    (INFER, tensor(pixels(0), "INT8"), 400, "datatype: got 'INT8'; allowed: BYTES, UINT8, FP32"),
    (INFER, tensor(pixels(0), shape=[8, 8, 3]), 400, "allowed for pixels: [n, height, width, channels]"),
    (INFER, tensor(pixels(0), shape=[1, 8, 8, 4]), 400, "[1, 8, 8, 4], 256 numbers, for 192 of them"),
    (INFER, tensor(pixels(0), shape=[2, 8, 4, 3]), 200, ""),
    (INFER, tensor(np.zeros((1, 8, 8, 4), dtype=int)), 400, "must be 1 or 3 channels"),
    (INFER, tensor(np.zeros((1, 0, 8, 3), dtype=int), shape=[1, 0, 8, 3]), 400, "must have some pixels"),
    (INFER, tensor(np.zeros((0, 8, 8, 3)), shape=[0, 8, 8, 3]), 400, "got no image"),
    (INFER, tensor([], shape=[0, 2**40, 2**40, 3]), 400, "got no image"),
    (INFER, tensor([], shape=[2**62, 0, 0, 3]), 413, "images in one request; at most 3 are allowed"),
    (INFER, tensor([], shape=[1, 2**62, 0, 3]), 400, "must have some pixels"),
    (INFER, tensor([0], shape=[1, 2**62, 2**62, 3]), 400, "numbers, for 1 of them"),
    (INFER, tensor([0], shape=[1, 10**4000, 10**4000, 3]), 400, "inputs.0.shape.1: got 1000"),
    (INFER, tensor([0], shape=[1] * 9), 400, "at most 8 items"),
    (INFER, tensor([10**400, 0, 0], "FP32", shape=[1, 1, 1, 3]), 400, "from 0 to 1"),
    (INFER, tensor(["x" * 20_000, *[""] * 2_000], shape=[1, 1, 667, 3]), 400, "whole numbers"),
    (INFER, tensor([[[[[0]]]]], shape=[1, 1, 1, 1]), 400, "whole numbers"),
    (INFER, tensor([[0, 0], 0], shape=[1, 1, 1, 3]), 400, "unequal lengths"),
    (INFER, tensor(pixels(0, 0, 0, 0)), 413, "4 images in one request"),
    (INFER, tensor(pixels(0) + 300.0), 400, "whole numbers"),
    (INFER, tensor(np.full((1, *SHAPE), 300)), 400, "got 300 to 300; allowed: 0 to 255"),
    (INFER, tensor(pixels(2, dtype=np.float32), "FP32"), 400, "from 0 to 1, not normalised"),
    (INFER, tensor([[1, 2], [3]], shape=[1, 1, 1, 3]), 400, "unequal lengths"),
    (INFER, tensor([True, False, True], shape=[1, 1, 1, 3]), 400, "whole numbers"),
    (INFER, tensor(["1", "2", "3"], shape=[1, 1, 1, 3]), 400, "whole numbers"),
    (INFER, tensor([b64(picture())], "BYTES", shape=[2]), 400, "got [2] for 1 images"),
    (INFER, tensor([b64(picture())], "BYTES", shape=[1, 1, 1]), 400, "allowed: [n] or [n, 1]"),
    (INFER, tensor([7], "BYTES"), 400, "allowed: strings"),
    (INFER, tensor(pixels(0), priority=3), 400, "priority: unknown; allowed: task, slo_ms"),
    (INFER, {**tensor(pixels(0)), "outputs": [{"name": "x"}]}, 400, "allowed: label, score, gamma, fate"),
]


@pytest.mark.parametrize(("path", "body", "status", "reason"), BAD, ids=[str(index) for index in range(len(BAD))])
async def test_bad_requests_are_told_why(path: str, body: Any, status: int, reason: str) -> None:
    async with gateway() as http:
        answer = await http.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
    assert answer.status_code == status, answer.text
    assert reason in answer.json().get("error", ""), answer.text


@pytest.mark.parametrize(
    ("shape", "datatype", "tail", "reason"),
    [
        ([1, 8, 8, 3], "UINT8", b"\0" * 191, "192 numbers, for 191 of them"),
        ([1, 8, 8, 3], "FP32", b"\0" * 192, "192 numbers, for 48 of them"),
        ([1, 8, 8, 3], "FP32", b"\xff" * 768, "from 0 to 1"),
        ([1, 2**40, 2**40, 3], "UINT8", b"\0", "numbers, for 1 of them"),
        ([1], "BYTES", struct.pack("<I", 99) + b"x", "ends within an element"),
    ],
)
async def test_bad_binary_tensors_are_told_why(shape: list[int], datatype: str, tail: bytes, reason: str) -> None:
    given = {"name": "image", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [given]}).encode()
    async with gateway() as http:
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answer = await http.post(INFER, content=head + tail, headers=headers)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]


EVICTED = Refusal("final", "it waited too long", 0.1, Outcome.SHED, Fault.EVICTED)


async def test_evicted_images_are_told_when_to_come_back() -> None:
    async with gateway(Replicas(EVICTED)) as http:
        answer = await http.post(CLASSIFY, content=picture())
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json() == {"error": "digits: it waited too long"}


async def test_keys_are_asked_for() -> None:
    async with gateway(api_keys=["k"]) as http:
        assert (await http.post(CLASSIFY, content=picture())).status_code == 401
        assert (await http.post("/v2/repository/models/digits/tasks/x/unload")).status_code == 401
        allowed = {"Authorization": "Bearer k"}
        assert (await http.post(CLASSIFY, content=picture(), headers=allowed)).status_code == 200


def test_metrics_show_gammas_and_fates() -> None:
    told = report()
    told |= {
        "gamma": -4,
        "gammas": {
            -4: GammaReport(batches=2, images=9, compute_s=0.5),
            0: GammaReport(batches=0, images=0, compute_s=0),
        },
        "in_time": 7,
        "evicted": 5,
    }
    digits = {"kind": "vision", "ready": True, "replica_range": [1, 1], "replicas": {"r": told}, "tasks": ["parity"]}
    stats = {"planner_reached": True, "services": {"digits": digits}}
    text = exposition(stats, {"vision": KIND}).decode()
    for line in (
        'pliant_vision_gamma{replica="r",service="digits"} -4.0',
        'pliant_vision_images_total{fate="in_time",replica="r",service="digits"} 7.0',
        'pliant_vision_images_total{fate="evicted",replica="r",service="digits"} 5.0',
        'pliant_vision_batches_total{gamma="-4",replica="r",service="digits"} 2.0',
        'pliant_vision_tasks_registered{service="digits"} 1.0',
    ):
        assert line in text
