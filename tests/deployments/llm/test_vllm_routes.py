"""What vLLM answers beside OpenAI's API, and load generators and load balancers ask for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support.scripted import TOKENIZER, Replica, Replicas, ids, language_model
from support.tenants import keyed

from pliant import __version__
from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.serving.services import Services


def gateway(folder: Path, replicas: Replicas, *names: str, keys: Collection[str] = ()) -> FastAPI:
    models = {name: language_model(folder, replicas) for name in names or ("chat",)}
    config, services = GatewayConfig(), Services.of("prompts", models)
    return application(config, services, dict, bytes, LlmKind().routers(services, None, config), keyed(keys))


@pytest.fixture
def http(tmp_path: Path) -> TestClient:
    return TestClient(gateway(tmp_path, Replicas(a=Replica())))


def test_probes_need_no_key_and_say_whether_there_are_replicas(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica())
    http = TestClient(gateway(tmp_path, replicas, keys=("key",)))
    probes = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
    assert [http.request(*probe).status_code for probe in probes] == [200] * 3
    assert http.get("/health").content == b""
    assert http.get("/version").status_code == 401
    assert http.get("/version", headers={"Authorization": "Bearer key"}).json() == {"version": __version__}
    replicas.table.lose("a")
    refused = [http.request(*probe) for probe in probes]
    assert [answer.status_code for answer in refused] == [503] * 3
    assert "not ready yet: chat" in refused[0].json()["error"]


def test_tokens_of_texts(http: TestClient) -> None:
    answer = http.post("/tokenize", json={"model": "chat", "prompt": "hé", "return_token_strs": True}).json()
    strings = [TOKENIZER.id_to_token(token) for token in ids("hé")]
    assert answer == {"count": 3, "max_model_len": 64, "tokens": list(ids("hé")), "token_strs": strings}
    assert http.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False}).json()["count"] == 3
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}


def test_tokens_of_chats_are_those_that_are_computed(http: TestClient) -> None:
    messages = [{"role": "user", "content": "y"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "u:y</s>a:"}
    answer = http.post("/v1/chat/completions", json={"model": "chat", "messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"model": "chat"}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("tokenize", {"prompt": "a", "speed": 1}, "speed"),
        ("detokenize", {"tokens": [257]}, "tokens"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_mistakes_are_named_in_openai_s_shape(http: TestClient, path: str, body: dict[str, object], param: str) -> None:
    answer = http.post(f"/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_of_several_models_one_is_to_be_named(tmp_path: Path) -> None:
    http = TestClient(gateway(tmp_path, Replicas(a=Replica()), "chat", "other"))
    error = http.post("/tokenize", json={"prompt": "a"}).json()["error"]
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
    assert "there are: " in error["message"]
    assert http.post("/tokenize", json={"model": "other", "prompt": "a"}).json()["count"] == 1
