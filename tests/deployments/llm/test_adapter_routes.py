"""vLLM's endpoints for adapters, and adapters as models of OpenAI's endpoints, with the real client and registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from support.peft_folders import adapter_folder, model_folder
from support.scripted import Replica, Replicas, language_model, report
from support.tenants import keyed

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.kinds import parse
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.llm.adapter_registry import AdapterRegistry
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.services import Services

GREEDY: dict[str, Any] = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
TALK: Any = [{"role": "user", "content": "y"}]


def gateway(
    models: Mapping[str, LanguageModel], adapters: AdapterFollower | None, keys: Collection[str] = ()
) -> FastAPI:
    config, services = GatewayConfig(), Services.of("prompts", models)
    return application(config, services, dict, bytes, LlmKind().routers(services, adapters, config), keyed(keys))


class Cluster:
    """Gateways over one registry and scripted replicas."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.roots = folder / "roots"
        adapters = {"roots": [str(self.roots)], **options}
        chat = {"kind": "llm", "model": model_folder(folder / "model"), "max_length": 64, "adapters": adapters}
        self.registry = AdapterRegistry(parse({"services": {"chat": chat}, "state": str(folder)}))
        self._part = CatalogPart(self.registry)
        self.replicas = Replicas(a=Replica())
        self._folder = folder

    def gateway(self, keys: Collection[str] = (), **options: Any) -> FastAPI:
        models = {"chat": language_model(self._folder, self.replicas, **options)}
        return gateway(models, AdapterFollower(self.ask), keys)

    async def ask(self, method: str, *args: Any) -> Any:
        """As `kind.Ask`."""
        return await getattr(self._part, method)(*args)

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.gateway(**options)), base_url="http://test/v1")


@pytest.fixture
async def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with cluster.http() as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


async def load(http: httpx.AsyncClient, name: str, path: str, **more: Any) -> httpx.Response:
    return await http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


async def test_an_adapter_is_a_model(cluster: Cluster, http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    folder = adapter_folder(cluster.roots / "sql", rank=8)
    loaded = await load(http, "my-sql", "sql")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'my-sql' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    plain = await client.completions.create(model="chat", **GREEDY)
    answer = await client.completions.create(model="my-sql", **GREEDY)
    assert (answer.model, plain.model) == ("my-sql", "chat")
    assert answer.system_fingerprint != plain.system_fingerprint
    stream = await client.completions.create(model="my-sql", **GREEDY, stream=True)
    assert {chunk.model async for chunk in stream} == {"my-sql"}
    assert (await client.chat.completions.create(model="my-sql", messages=TALK)).model == "my-sql"
    assert (await client.chat.completions.create(model="chat", messages=TALK)).model == "chat"
    sent = [generation.adapter for generation in cluster.replicas.asked]
    assert [adapter and (adapter.name, adapter.rank) for adapter in sent] == [
        None,
        *[("my-sql", 8)] * 3,
        None,
    ]
    assert [recorded[-1] for recorded in cluster.replicas.recorder.events] == [0, 8, 8, 8, 0]
    models = {model.id: model.model_dump() async for model in client.models.list()}
    assert (models["chat"]["parent"], models["chat"]["root"]) == (None, "m")
    assert (models["my-sql"]["parent"], models["my-sql"]["root"]) == ("chat", folder.name)
    assert (await client.models.retrieve("my-sql")).model_dump() == models["my-sql"]
    assert models["my-sql"]["created"] > 0


async def test_an_unloaded_adapter_is_gone_but_answers_under_way_end(
    cluster: Cluster, http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    adapter_folder(cluster.roots / "sql")
    await load(http, "sql", "sql")
    stream = await client.completions.create(model="sql", **GREEDY, stream=True)
    await anext(aiter(stream))
    unloaded = await http.post("/unload_lora_adapter", json={"lora_name": "sql"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert len([chunk async for chunk in stream]) == 11
    with pytest.raises(openai.NotFoundError, match="no 'sql'; there are: chat"):
        await client.completions.create(model="sql", **GREEDY)
    assert [model.id async for model in client.models.list()] == ["chat"]


async def test_every_gateway_knows_what_one_was_told(cluster: Cluster, http: httpx.AsyncClient) -> None:
    adapter_folder(cluster.roots / "sql")
    async with cluster.http() as other:
        assert (await load(http, "sql", "sql")).status_code == 200
        answer = await other.post("/completions", json={"model": "sql", **GREEDY})
        assert answer.json()["model"] == "sql"


async def test_errors(cluster: Cluster, http: httpx.AsyncClient) -> None:
    adapter_folder(cluster.roots / "sql")
    adapter_folder(cluster.roots / "wide", hidden=32)
    assert (await load(http, "sql", "sql")).status_code == 200
    expected = {
        (403, "lora_path", "lies outside of the folders from which chat loads adapters"): await load(http, "x", "/etc"),
        (404, "lora_path", "there is no folder 'nothing'"): await load(http, "x", "nothing"),
        (400, "lora_path", "wide"): await load(http, "x", "wide"),
        (400, "lora_name", "'sql' of chat is loaded already"): await load(http, "sql", "sql"),
        (400, "lora_name", "'chat' is the name of a model"): await load(http, "chat", "sql"),
        (400, "lora_name", "must be up to 200 letters"): await load(http, "a b", "sql"),
        (400, "base_model_name", "got 'gpt'; with adapters there are: chat"): await load(
            http, "x", "sql", base_model_name="gpt"
        ),
        (400, "lora_path", "lora_path"): await load(http, "x", ""),
        (400, "speed", "unknown parameter"): await load(http, "x", "sql", speed=1),
        (400, "lora_path", "missing"): await http.post("/load_lora_adapter", json={"lora_name": "x"}),
        (400, "lora_name", "got 5"): await http.post("/unload_lora_adapter", json={"lora_name": 5}),
        (404, "lora_name", "no adapter 'x'"): await http.post("/unload_lora_adapter", json={"lora_name": "x"}),
        (405, None, "GET"): await http.get("/load_lora_adapter"),
    }
    for (status, param, text), answer in expected.items():
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error
        assert text in error["message"]
    assert (await load(http, "sql", "sql", load_inplace=True)).status_code == 200


async def test_where_clients_may_change_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, runtime=False)
    adapter_folder(cluster.roots / "sql")
    async with cluster.http() as http:
        answer = await load(http, "sql", "sql")
        assert answer.status_code == 403
        assert "chat has adapters.runtime: false" in answer.json()["error"]["message"]


async def test_the_listing_follows_changes(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """It is kept between them, as thousands take a while."""
    adapter_folder(cluster.roots / "sql")

    async def listed() -> list[tuple[str, int]]:
        cards = (await http.get("/models")).raise_for_status().json()["data"]
        return [(card["id"], card["max_model_len"]) for card in cards]

    assert await listed() == [("chat", 64)]
    assert (await load(http, "sql", "sql")).status_code == 200
    assert await listed() == await listed() == [("chat", 64), ("sql", 64)]
    cluster.replicas.table.sync({"a": {**report(), "max_length": 40}})
    assert await listed() == [("chat", 40), ("sql", 40)]
    assert (await http.post("/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
    assert await listed() == [("chat", 40)]


async def test_keys_are_asked_for(cluster: Cluster) -> None:
    adapter_folder(cluster.roots / "sql")
    async with cluster.http(keys=["key"]) as stranger:
        for path in ("/load_lora_adapter", "/unload_lora_adapter"):
            answer = await stranger.post(path, json={"lora_name": "sql", "lora_path": "sql"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        stranger.headers["Authorization"] = "Bearer key"
        assert (await load(stranger, "sql", "sql")).status_code == 200


async def test_where_no_model_takes_adapters(tmp_path: Path) -> None:
    models = {"chat": language_model(tmp_path, Replicas(a=Replica()))}
    config = parse({"services": {"chat": {"kind": "llm", "model": model_folder(tmp_path / "model")}}})

    async def ask(method: str, *args: Any) -> Any:
        raise AssertionError(f"there is nothing to ask for: {method}")

    app = gateway(models, LlmKind().follower(ask, config))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1") as http:
        answer = await load(http, "sql", "sql")
        assert answer.status_code == 400
        assert "no language model here takes adapters" in answer.json()["error"]["message"]
        assert (await http.post("/completions", json={"model": "sql", **GREEDY})).status_code == 404


async def test_an_error_does_not_list_thousands(cluster: Cluster, http: httpx.AsyncClient) -> None:
    adapter_folder(cluster.roots / "sql")
    assert (await load(http, "sql", "sql")).status_code == 200
    catalog = cluster.registry.catalog
    entry = catalog.entries["sql"]
    names = [f"tenant-{index}" for index in range(2000)]
    catalog.put({name: entry._replace(adapter=entry.adapter._replace(name=name)) for name in names})
    answer = await http.post("/completions", json={"model": "nobody", **GREEDY})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "chat, sql, tenant-0" in message
    assert message.endswith("and more, which /v1/models lists")
    assert len(message) < 500
    assert len((await http.get("/models")).json()["data"]) == 2002
    assert (await http.post("/completions", json={"model": "tenant-1999", **GREEDY})).json()["model"] == "tenant-1999"
