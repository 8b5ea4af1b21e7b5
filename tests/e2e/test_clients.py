"""The real clients, unchanged, against the running default cluster."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from support.waiting import HANGS_AFTER_S
from tritonclient.utils import InferenceServerException

from e2e.cluster import Cluster

TEXT = "The yield expression is used when defining a generator function"


def text_input(texts: list[str], *, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object), binary_data=binary)
    return tensor


def test_hugging_face_client(cluster: Cluster) -> None:
    client = InferenceClient(model=f"{cluster.address}/models/topics")
    answer = client.text_classification(TEXT, top_k=2)
    assert answer[0].label == "expressions"
    assert len(answer) == 2
    assert 1 >= answer[0].score >= answer[1].score >= 0


def test_hugging_face_client_is_told_what_was_wrong(cluster: Cluster) -> None:
    client = InferenceClient(model=f"{cluster.address}/models/topics")
    with pytest.raises(HfHubHTTPError) as error:
        client.text_classification("word " * 600)
    assert error.value.response.status_code == 422
    assert "takes at most 512" in error.value.response.json()["error"]


def test_triton_client_binary_and_json_agree(cluster: Cluster) -> None:
    client = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S)
    texts = [TEXT, "An assignment statement evaluates the expression list", "x" * 300]
    binary = client.infer("topics", [text_input(texts)], request_id="7")
    outputs = [triton.InferRequestedOutput(name, binary_data=False) for name in ("label", "score")]
    plain = client.infer("topics", [text_input(texts, binary=False)], outputs=outputs)
    assert binary.get_response()["id"] == "7"
    assert binary.as_numpy("label")[0, 0] == b"expressions"
    assert (
        plain.as_numpy("label").tolist() == [[label.decode() for label in row] for row in binary.as_numpy("label")]
        or (plain.as_numpy("label") == binary.as_numpy("label")).all()
    )
    np.testing.assert_allclose(plain.as_numpy("score"), binary.as_numpy("score"), atol=1e-6)
    np.testing.assert_allclose(binary.as_numpy("score").sum(axis=1), 1, atol=1e-5)


def test_triton_client_as_in_the_readme(cluster: Cluster) -> None:
    client = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S)
    texts = ["Return a copy of the string", "Set a breakpoint, then step"]
    answer = client.infer("topics", [text_input(texts)], parameters={"top_k": 1})
    assert answer.as_numpy("label").tolist() == [[b"strings"], [b"debugger"]]


def test_triton_client_compressed(cluster: Cluster) -> None:
    client = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S)
    answer = client.infer("topics", [text_input([TEXT])], request_compression_algorithm="gzip", parameters={"top_k": 1})
    assert answer.as_numpy("label").tolist() == [[b"expressions"]]


def test_triton_client_health_and_metadata(cluster: Cluster) -> None:
    client = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("topics")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "pliant"
    metadata = client.get_model_metadata("topics", "1")
    assert metadata["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]


def test_triton_client_is_told_what_was_wrong(cluster: Cluster) -> None:
    client = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S)
    with pytest.raises(InferenceServerException, match=r"no model 'nothing'; there are: .*topics"):
        client.infer("nothing", [text_input([TEXT])])
    with pytest.raises(InferenceServerException, match="at most 64 are allowed"):
        client.infer("topics", [text_input([TEXT] * 65)])


def test_both_protocols_give_the_same_scores(cluster: Cluster) -> None:
    hugging_face = cluster.classify(TEXT).json()[0]
    answer = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S).infer(
        "topics", [text_input([TEXT])]
    )
    assert [item["label"].encode() for item in hugging_face] == answer.as_numpy("label")[0].tolist()
    np.testing.assert_allclose([item["score"] for item in hugging_face], answer.as_numpy("score")[0], atol=1e-6)
