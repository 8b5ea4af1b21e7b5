"""Embeddings and reranking by the default cluster, with the real clients."""

from __future__ import annotations

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from support.waiting import HANGS_AFTER_S

from e2e.cluster import Cluster

NEEDS = ("search",)
QUERY = "How do I set a breakpoint?"
TEXTS = ["Return a copy of the string", "Set a breakpoint, then step"]


def test_all_clients_get_the_same_vectors(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.address}/v1", api_key="none", timeout=HANGS_AFTER_S)
    found = client.embeddings.create(model="search", input=TEXTS)
    vectors = np.array([each.embedding for each in found.data], np.float32)
    assert vectors.shape == (2, 256)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens == 16
    features = InferenceClient(model=f"{cluster.address}/models/search").feature_extraction(TEXTS)  # type: ignore[arg-type]
    np.testing.assert_allclose(features, vectors, atol=1e-5)
    tensor = triton.InferInput("text", [2], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object))
    infer = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S).infer("search", [tensor])
    np.testing.assert_allclose(infer.as_numpy("embedding"), vectors, atol=1e-5)


def test_documents_are_found(cluster: Cluster) -> None:
    body = {"model": "search", "query": QUERY, "documents": TEXTS}
    answer = httpx.post(f"{cluster.address}/rerank", json=body, timeout=HANGS_AFTER_S).raise_for_status().json()
    assert [each["index"] for each in answer["results"]] == [1, 0]
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores[0] > 0.5 > scores[1]
    alike = InferenceClient(model=f"{cluster.address}/models/search").sentence_similarity(QUERY, TEXTS)
    assert alike[::-1] == pytest.approx(scores, abs=1e-5)


def test_each_text_is_counted(cluster: Cluster) -> None:
    before = cluster.get("/stats")["services"]["search"]["requests"].get("ok", 0)
    client = openai.OpenAI(base_url=f"{cluster.address}/v1", api_key="none", timeout=HANGS_AFTER_S)
    client.embeddings.create(model="search", input=TEXTS)
    assert cluster.get("/stats")["services"]["search"]["requests"]["ok"] == before + 2


def test_what_does_not_embed_is_named(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.address}/v1", api_key="none", timeout=HANGS_AFTER_S)
    with pytest.raises(openai.NotFoundError, match="there are: search"):
        client.embeddings.create(model="nothing", input="a")
    with pytest.raises(openai.BadRequestError, match="token ids of search are 0 to"):
        client.embeddings.create(model="search", input=[[1_000_000]])
