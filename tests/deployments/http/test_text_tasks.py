"""Embeddings, entities, pairs and scores over HTTP, with the real clients and real, tiny models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from support.encoder_models import EncoderService, save, save_pooling
from support.http_server import listening
from support.tenants import tenants

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.parameters import EmbedParameters
from pliant.deployments.http.texts import Embedding, Input
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.serving.services import Services
from pliant.models.encoder_info import read_encoder

TEXT = "Berlin is in Germany, the cats sat on a great mat."
NAMES = ["O", "B-LOC", "I-LOC"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_pooling(save(root / "vectors", "bert", "embed"), "mean", True, prompts={"query": "the "})
    save(root / "reranker", "bert", "classify", num_labels=1)
    save(root / "entities", "bert", "tokens", id2label=dict(enumerate(NAMES)))
    inference = {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}}
    save(root / "inference", "bert", "classify", **inference)
    save(root / "topics", "roberta", "classify", type_vocab_size=1)
    return {folder.name: folder for folder in sorted(root.iterdir())}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[str]:
    services = Services.of("texts", {name: EncoderService(folder, name).classifier for name, folder in folders.items()})
    allowed = tenants(anonymous={}, all={}, guest={"services": ["topics"]})
    with listening(application(GatewayConfig(max_texts=8), services, dict, bytes, tenants=allowed)) as host:
        yield host


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server}") as client:
        yield client


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server}/v1", api_key="all", max_retries=0)


def hugging_face(server: str, model: str) -> InferenceClient:
    return InferenceClient(model=f"http://{server}/models/{model}", token="all")


def test_openai_client(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="vectors", input=[TEXT, "the cat"], encoding_format="float")
    packed = client.embeddings.create(model="vectors", input=[TEXT, "the cat"])  # in base64, which it asks for
    assert [each.index for each in found.data] == [0, 1]
    for one, other in zip(found.data, packed.data, strict=True):
        np.testing.assert_array_equal(np.float32(one.embedding), np.float32(other.embedding))
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-6)
    alone = client.embeddings.create(model="vectors", input="the cat")
    np.testing.assert_allclose(alone.data[0].embedding, found.data[1].embedding, atol=1e-6)
    assert (alone.usage.prompt_tokens, alone.usage.total_tokens, alone.model) == (4, 4, "vectors")
    assert found.usage.prompt_tokens > 4


class Counting:
    """Makes a vector of how many texts came with a text."""

    task = "embed"
    name = "counting"
    ready = True
    root = "/models/counting"
    max_length = 8

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.sent: list[int] = []

    async def embed(self, texts: Sequence[Input], parameters: EmbedParameters) -> list[Embedding]:
        self.sent.append(len(texts))
        revision = "fp_old" if len(self.sent) == 1 else "fp_new"
        return [Embedding(np.full(1, len(texts), np.float32), self.tokens, None, revision) for _ in texts]


async def ask(counting: Counting, texts: int) -> httpx.Response:
    config = GatewayConfig(max_texts=8)
    app = application(config, Services.of("texts", {"counting": counting}), dict, bytes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return await http.post("/v1/embeddings", json={"model": "counting", "input": ["a"] * texts})


async def test_many_texts_are_sent_a_few_at_a_time() -> None:
    counting = Counting(tokens=3)
    answer = (await ask(counting, 20)).json()
    assert counting.sent == [8, 8, 4]
    assert [each["index"] for each in answer["data"]] == list(range(20))
    assert [each["embedding"] for each in answer["data"]] == [[8]] * 16 + [[4]] * 4
    assert answer["system_fingerprint"] == "fp_new,fp_old"
    assert answer["usage"] == {"prompt_tokens": 60, "total_tokens": 60}
    whole = Counting(tokens=1)
    assert len((await ask(whole, 2048)).json()["data"]) == 2048
    assert set(whole.sent) == {8}


async def test_texts_of_too_many_tokens_in_all_are_refused_before_the_rest_is_sent() -> None:
    counting = Counting(tokens=20_000)
    answer = await ask(counting, 2048)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "input")
    assert "more than 300,000 tokens" in answer.json()["error"]["message"]
    assert counting.sent == [8, 8]


async def test_services_are_listed_by_all_protocols() -> None:
    services = Services.of("texts", {"counting": Counting(1), "labels": Labelling()})
    config = GatewayConfig()
    app = application(config, services, dict, bytes, LlmKind().routers(services, None, config))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    async with openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http) as client:
        [card] = [model async for model in client.models.list()]
        assert (card.id, card.created > 0, card.model_dump()["root"]) == ("counting", True, "counting")
        assert (await client.models.retrieve("counting")) == card
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("labels")
        index = (await http.post("/v2/repository/index")).json()
    assert index == [
        {"name": "counting", "version": "1", "state": "READY", "reason": ""},
        {"name": "labels", "version": "1", "state": "UNAVAILABLE", "reason": "loading"},
    ]


class Labelling:
    """Labels texts, but not now."""

    task = "classify"
    name = "labels"
    ready = False
    state = "loading"


def test_openai_client_with_token_ids_dimensions_and_prompts(client: openai.OpenAI, folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folders["vectors"])("the cat")["input_ids"]
    plain = client.embeddings.create(model="vectors", input="the cat").data[0].embedding
    for given in (ids, [ids]):
        assert client.embeddings.create(model="vectors", input=given).data[0].embedding == pytest.approx(
            plain, abs=1e-6
        )
    prompted = client.embeddings.create(model="vectors", input="cat", extra_body={"prompt_name": "query"})
    assert prompted.data[0].embedding == pytest.approx(plain, abs=1e-6)
    short = client.embeddings.create(model="vectors", input="the cat", dimensions=4).data[0].embedding
    assert short == pytest.approx(np.array(plain[:4]) / np.linalg.norm(plain[:4]), abs=1e-6)


def test_base64_is_of_little_endian_floats(http: httpx.Client) -> None:
    body = {"model": "vectors", "input": "the cat"}
    packed = http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    plain = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.float32(plain))


def test_hugging_face_client(server: str, client: openai.OpenAI) -> None:
    vectors = hugging_face(server, "vectors")
    plain = client.embeddings.create(model="vectors", input="the cat").data[0].embedding
    np.testing.assert_allclose(vectors.feature_extraction("the cat"), plain, atol=1e-6)
    np.testing.assert_allclose(vectors.feature_extraction("cat", prompt_name="query", truncate=True), plain, atol=1e-6)
    assert vectors.feature_extraction(["the cat", TEXT], normalize=True).shape == (2, 32)  # type: ignore[arg-type]
    alike = vectors.sentence_similarity("the cat", ["the cat", TEXT])
    assert alike[0] == pytest.approx(1.0, abs=1e-5)
    assert alike[1] < 1
    entities = hugging_face(server, "entities")
    tokens = entities.token_classification(TEXT, ignore_labels=[])
    groups = entities.token_classification(TEXT, aggregation_strategy="simple", ignore_labels=[])
    assert tokens[0].word == "ber"
    assert len(tokens) > len(groups)
    assert {group.entity_group for group in groups} <= {"O", "LOC"}
    assert (groups[0].start, groups[-1].end) == (0, len(TEXT))
    assert {each.label for each in hugging_face(server, "topics").text_classification(TEXT)} == set(
        read_labels(server, "topics")
    )


def test_hugging_face_zero_shot(server: str, http: httpx.Client) -> None:
    found = hugging_face(server, "inference").zero_shot_classification(TEXT, ["cat", "mat"], multi_label=True)
    assert {each.label for each in found} == {"cat", "mat"}
    options = {"candidate_labels": ["cat", "mat"], "multi_label": True, "top_k": 1}
    [several] = http.post("/models/inference", json={"inputs": [TEXT], "parameters": options}).json()
    assert several == [{"label": found[0].label, "score": pytest.approx(found[0].score, abs=1e-6)}]


def read_labels(server: str, model: str) -> list[str]:
    labels: str = httpx.get(f"http://{server}/v2/models/{model}").json()["parameters"]["labels"]
    return labels.split(",")


def test_hugging_face_pairs(http: httpx.Client) -> None:
    pair = {"text": "the cat", "text_pair": "sat"}
    [one] = http.post("/models/reranker", json={"inputs": pair}).json()
    two = http.post("/models/reranker", json={"inputs": [pair, "the cat sat", {"text": "the cat sat"}]}).json()
    assert two[0] == one
    assert two[1] == two[2] != one
    assert one[0]["label"] == "LABEL_0"


def text_input(name: str, texts: list[str], binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput(name, [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object), binary_data=binary)
    return tensor


@pytest.mark.parametrize("binary", [True, False])
def test_triton_client(server: str, http: httpx.Client, binary: bool) -> None:
    infer = triton.InferenceServerClient(server)
    texts = ["the cat", TEXT]
    vectors = infer.infer("vectors", [text_input("text", texts, binary)], parameters={"dimensions": 8})
    plain = http.post("/v1/embeddings", json={"model": "vectors", "input": texts, "dimensions": 8}).json()["data"]
    np.testing.assert_allclose(vectors.as_numpy("embedding"), [each["embedding"] for each in plain], atol=1e-6)

    options = {"aggregation_strategy": "simple"}
    found = infer.infer("entities", [text_input("text", texts, binary)], parameters=options)
    said = http.post("/models/entities", json={"inputs": texts, "parameters": options}).json()
    assert found.as_numpy("count").tolist() == [[len(each)] for each in said]
    for row, each in enumerate(said):
        told = [
            {
                "entity_group": str(found.as_numpy("entity")[row, at], "utf-8"),
                "score": pytest.approx(found.as_numpy("score")[row, at]),
                "word": str(found.as_numpy("word")[row, at], "utf-8"),
                "start": found.as_numpy("start")[row, at],
                "end": found.as_numpy("end")[row, at],
            }
            for at in range(len(each))
        ]
        assert told == each
    assert (found.as_numpy("end")[0, len(said[0]) :] == 0).all()

    pairs = [text_input("text_pair", ["sat", "on a mat"], binary), text_input("text", texts, binary)]
    scored = infer.infer("reranker", pairs).as_numpy("score")
    given = {"inputs": [{"text": "the cat", "text_pair": "sat"}, {"text": TEXT, "text_pair": "on a mat"}]}
    wanted = http.post("/models/reranker", json=given).json()
    np.testing.assert_allclose(scored, [[each[0]["score"]] for each in wanted], atol=1e-6)


def test_metadata_tells_task_inputs_and_outputs(server: str) -> None:
    client = triton.InferenceServerClient(server)
    found = {name: client.get_model_metadata(name) for name in ("vectors", "reranker", "entities", "topics")}
    assert [found[name]["parameters"]["task"] for name in found] == ["embed", "classify", "tokens", "classify"]
    assert found["vectors"]["parameters"]["dimensions"] == 32
    assert [each["name"] for each in found["reranker"]["inputs"]] == ["text", "text_pair"]
    assert [each["name"] for each in found["topics"]["inputs"]] == ["text"]
    outputs = {name: [each["name"] for each in told["outputs"]] for name, told in found.items()}
    assert outputs["vectors"] == ["embedding"]
    assert outputs["entities"] == ["entity", "score", "word", "start", "end", "count"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["reranker", "vectors"])
def test_rerank(http: httpx.Client, path: str, model: str) -> None:
    documents = ["sat on a mat", {"text": TEXT}, "the cat"]
    body = {"model": model, "query": "the cat", "documents": documents}
    answer = http.post(path, json=body).json()
    results = answer["results"]
    assert sorted(each["index"] for each in results) == [0, 1, 2]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert [each["document"]["text"] for each in results] == [
        ["sat on a mat", TEXT, "the cat"][each["index"]] for each in results
    ]
    assert answer["model"] == model
    assert answer["usage"]["total_tokens"] > 0
    best = http.post(path, json={**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{"index": results[0]["index"], "relevance_score": pytest.approx(scores[0], abs=1e-6)}]
    data = http.post("/score", json={"model": model, "text_1": "the cat", "text_2": ["sat on a mat", TEXT, "the cat"]})
    by_index = {each["index"]: each["relevance_score"] for each in results}
    assert [each["score"] for each in data.json()["data"]] == pytest.approx([by_index[at] for at in range(3)], abs=1e-6)


def test_score_of_as_many_of_both(http: httpx.Client) -> None:
    both = http.post("/v1/score", json={"model": "reranker", "text_1": ["a", "the cat"], "text_2": ["b", "sat"]}).json()
    one = http.post("/score", json={"model": "reranker", "text_1": "the cat", "text_2": "sat"}).json()
    assert (both["object"], [each["object"] for each in both["data"]]) == ("list", ["score", "score"])
    assert both["data"][1]["score"] == pytest.approx(one["data"][0]["score"], abs=1e-6)


def test_classify(http: httpx.Client, server: str) -> None:
    answer = http.post("/classify", json={"model": "topics", "input": [TEXT, "the cat"]}).json()
    labels = read_labels(server, "topics")
    said = http.post("/models/topics", json={"inputs": [TEXT, "the cat"]}).json()
    for each, wanted in zip(answer["data"], said, strict=True):
        assert each["label"] == wanted[0]["label"]
        assert each["num_classes"] == 3
        assert dict(zip(labels, each["probs"], strict=True)) == pytest.approx(
            {one["label"]: one["score"] for one in wanted}, abs=1e-6
        )


ROUTES = ["/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify"]
VECTORS = {"model": "vectors", "input": "a"}
RERANK = {"model": "reranker", "query": "a", "documents": ["b"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/embeddings", {**VECTORS, "model": "x"}, 404, "no 'x' that makes vectors of texts; there are: vectors"),
        ("/v1/embeddings", {**VECTORS, "model": "topics"}, 400, "topics labels texts; choose one that makes"),
        ("/v1/embeddings", {**VECTORS, "input": []}, 400, "input: got []; must be a text, its token ids"),
        ("/v1/embeddings", {**VECTORS, "input": [1, "a"]}, 400, "input: got "),
        ("/v1/embeddings", {**VECTORS, "input": ""}, 200, ""),
        ("/v1/embeddings", {**VECTORS, "input": [[1, 99]]}, 400, "token ids of vectors are 0 to 98"),
        ("/v1/embeddings", {**VECTORS, "input": ["a"] * 2049}, 413, "2049 texts in one request; at most 2048"),
        ("/v1/embeddings", {**VECTORS, "input": "a " * 65}, 422, "takes at most 64"),
        ("/v1/embeddings", {**VECTORS, "dimensions": 33}, 400, "embeddings of vectors have 32"),
        ("/v1/embeddings", {**VECTORS, "dimensions": 0}, 400, "dimensions: got 0"),
        ("/v1/embeddings", {**VECTORS, "prompt_name": "x"}, 400, "prompts of vectors: query"),
        ("/v1/embeddings", {**VECTORS, "prompt_name": 1}, 400, "prompt_name: got 1"),
        ("/v1/embeddings", {**VECTORS, "encoding_format": "int8"}, 400, "encoding_format: got 'int8'"),
        ("/v1/embeddings", {**VECTORS, "x": 1}, 400, "x: unknown parameter; known: "),
        ("/v1/embeddings", {"model": "vectors"}, 400, "input: missing"),
        ("/rerank", {**RERANK, "documents": []}, 400, "documents"),
        ("/rerank", {**RERANK, "documents": ["a"] * 9}, 413, "9 documents in one request; at most 8"),
        ("/rerank", {**RERANK, "top_n": 0}, 400, "top_n: got 0"),
        ("/rerank", {**RERANK, "model": "topics"}, 400, "only models of one label"),
        ("/rerank", {**RERANK, "model": "entities"}, 400, "labels the tokens of texts; choose one that compares texts"),
        ("/v1/rerank", {**RERANK, "model": "x"}, 404, "no 'x'"),
        ("/score", {"model": "reranker", "text_1": ["a", "b"], "text_2": "c"}, 400, "text_1: got 2, and 1 of text_2"),
        ("/score", {"model": "reranker", "text_1": "a", "text_2": ["b"] * 9}, 413, "9 texts"),
        ("/classify", {"model": "vectors", "input": "a"}, 400, "makes vectors of texts"),
        ("/classify", {"model": "topics", "input": ["a"] * 9}, 413, "9 texts"),
        ("/models/vectors", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "got no text"),
        ("/models/vectors", {"inputs": "a", "truncation_direction": "left"}, 400, "truncation_direction"),
        (
            "/models/inference",
            {"inputs": ["a", "b"], "parameters": {"candidate_labels": ["c"] * 5}},
            413,
            "10 labels in one request",
        ),
        (
            "/models/inference",
            {"inputs": "a", "parameters": {"candidate_labels": ["c"], "hypothesis_template": "no"}},
            400,
            "parameters.hypothesis_template: got 'no'",
        ),
        ("/models/topics", {"inputs": "a", "parameters": {"candidate_labels": ["c"]}}, 400, "begins with 'entail'"),
        ("/models/entities", {"inputs": {"text": "a", "text_pair": "b"}}, 400, "inputs"),
        ("/models/entities", {"inputs": "a", "parameters": {"aggregation_strategy": "x"}}, 400, "aggregation_strategy"),
        (
            "/v2/models/vectors/infer",
            {"inputs": ["text_pair"]},
            400,
            "one is allowed, named text, and text_pair",
        ),
        ("/v2/models/vectors/infer", {"inputs": ["text", "text_pair"]}, 400, "vectors reads single texts"),
        ("/v2/models/entities/infer", {"inputs": ["text", "text_pair"]}, 400, "entities reads single texts"),
        ("/v2/models/reranker/infer", {"inputs": ["text", "text"]}, 400, "exactly one is allowed"),
    ],
)
def test_what_is_wrong_is_said(http: httpx.Client, path: str, body: dict[str, Any], status: int, reason: str) -> None:
    if path.startswith("/v2"):
        tensors = [{"name": name, "shape": [1], "datatype": "BYTES", "data": ["a"]} for name in body["inputs"]]
        body = {"inputs": tensors}
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert reason in answer.text.replace("\\", "")
    if status != 200:
        error = answer.json()["error"]
        assert isinstance(error, dict if path.startswith("/v1/") else str)


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify"]
)
def test_a_tenant_is_held_to_its_services(http: httpx.Client, path: str) -> None:
    other = {"text_1": "a", "text_2": "b"} if "score" in path else {"query": "a", "documents": ["b"]}
    model = "reranker" if "score" in path or "rerank" in path else "vectors"
    body = {"model": model, **({"input": "a"} if model == "vectors" else other)}
    assert http.post(path, json=body, headers={"Authorization": "Bearer guest"}).status_code == 403
    assert http.post(path, json=body, headers={"Authorization": "Bearer x"}).status_code == 401


def test_a_second_binary_tensor_that_is_cut_short_is_refused(http: httpx.Client) -> None:
    tail = b"\x01\x00\x00\x00a"
    tensors = [
        {"name": name, "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(tail)}}
        for name in ("text", "text_pair")
    ]
    head = json.dumps({"inputs": tensors}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert http.post("/v2/models/reranker/infer", content=head + 2 * tail, headers=headers).status_code == 200
    for wrong in (tail, 2 * tail + b"x", tail + tail[:-1]):
        answer = http.post("/v2/models/reranker/infer", content=head + wrong, headers=headers)
        assert answer.status_code == 400
        assert "inputs.1.parameters.binary_data_size" in answer.json()["error"]


def test_folders_say_what_they_are_for(folders: dict[str, Path]) -> None:
    assert {name: read_encoder(folder).task for name, folder in folders.items()} == {
        "entities": "tokens",
        "inference": "classify",
        "reranker": "classify",
        "topics": "classify",
        "vectors": "embed",
    }
