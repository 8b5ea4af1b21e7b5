"""Tenants over HTTP: keys, rights, limits and what clients are told of them, and on whose behalf work is done."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support.tenants import tenants
from support.waiting import until

from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.config.tenants import TenantConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Prediction
from pliant.deployments.kinds import loaded
from pliant.deployments.serving import tracing
from pliant.deployments.serving.keys import Tenants
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.services import Service, Services
from pliant.deployments.serving.tenants import current


class Model:
    """Answers with who asked; a text is as many tokens as it has characters."""

    labels = ("tenant",)
    ready = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.go_on = asyncio.Event()
        self.asked = 0

    async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
        self.asked += 1
        if texts[0] == "wait":
            await self.go_on.wait()
        current().spend(sum(map(len, texts)))
        return [Prediction([current().name], [current().tenant.weight], None) for _ in texts]


def application_of(tenants: Tenants, *models: Model) -> FastAPI:
    models = models or (Model("topics"), Model("other"))
    services = [Service(model.name, "encoder", "texts") for model in models]
    for service, model in zip(services, models, strict=True):
        service.open(model)
    found, config = Services(services), GatewayConfig()
    routers = [router for kind in loaded().values() for router in kind.routers(found, None, config)]
    return application(config, found, lambda: {"tenants": tenants.facts()}, lambda: b"# nothing\n", routers, tenants)


def client(**configs: dict[str, Any]) -> TestClient:
    return TestClient(application_of(tenants(**configs)))


def ask(http: TestClient, key: str | None = None, model: str = "topics", text: str = "a") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return http.post(f"/models/{model}", json={"inputs": text}, headers=headers)


def test_each_works_on_its_own_behalf() -> None:
    http = client(a={"weight": 2}, b={})
    assert ask(http, "a").json() == [[{"label": "a", "score": 2.0}]]
    assert ask(http, "b").json() == [[{"label": "b", "score": 1.0}]]


@pytest.mark.parametrize("key", [None, "c", ""])
def test_strangers_are_refused(key: str | None) -> None:
    refused = ask(client(a={}), key)
    assert refused.status_code == 401
    assert refused.headers["WWW-Authenticate"] == "Bearer"


def test_anonymous_is_a_tenant_where_it_is_declared() -> None:
    http = client(a={}, anonymous={"services": ["other"]})
    assert ask(http, None, "other").json()[0][0]["label"] == "anonymous"
    assert ask(http, None, "topics").status_code == 403
    assert ask(http, "wrong", "other").status_code == 401, "a wrong key is a mistake"


def test_without_any_key_everybody_may_do_all() -> None:
    http = TestClient(application_of(tenants()))
    assert ask(http, "whatever").json()[0][0]["label"] == "anonymous"
    assert http.get("/stats").status_code == 200


ROUTES = [
    ("infer", "POST", "/models/topics"),
    ("infer", "POST", "/v2/models/topics/infer"),
    ("infer", "GET", "/v2/models/topics"),
    ("manage", "POST", "/v1/load_lora_adapter"),
    ("manage", "POST", "/v1/unload_lora_adapter"),
    ("manage", "POST", "/v2/repository/models/digits/tasks/t/load"),
    ("manage", "POST", "/v2/repository/models/digits/tasks/t/unload"),
    ("observe", "GET", "/stats"),
    ("observe", "GET", "/metrics"),
]


@pytest.mark.parametrize(("right", "method", "path"), ROUTES)
def test_rights(right: str, method: str, path: str) -> None:
    others = [other for other in ("infer", "manage", "observe") if other != right]
    http = client(has={"rights": [right]}, lacks={"rights": others})
    body = {"inputs": "a", "lora_name": "x", "lora_path": "/x"} if method == "POST" else None

    def call(key: str) -> httpx.Response:
        return http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})

    refused = call("lacks")
    assert refused.status_code == 403
    assert f"lacks the right '{right}'" in refused.text
    assert call("has").status_code != 403


def test_services() -> None:
    http = client(a={"services": ["topics"]})
    assert ask(http, "a").status_code == 200
    refused = ask(http, "a", "other")
    assert refused.status_code == 403
    assert refused.json() == {"error": "tenant a may not use other; it may use topics"}


def test_requests_per_minute() -> None:
    http = client(a={"requests_per_minute": 2}, b={})
    answers = [ask(http, "a") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    assert answers[-1].headers["x-ratelimit-reset-requests"] == "1m0s"
    assert answers[-1].headers["Retry-After"] == "30"
    assert "limit of 2 requests per minute" in answers[-1].json()["error"]
    unlimited = ask(http, "b")
    assert unlimited.status_code == 200
    assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]
    assert http.get("/v1/models", headers={"Authorization": "Bearer a"}).status_code != 429, "that is no work"


def test_tokens_per_minute_may_be_owed() -> None:
    http = client(a={"tokens_per_minute": 10})
    assert ask(http, "a", text="a" * 15).status_code == 200
    refused = ask(http, "a")
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert refused.headers["Retry-After"] == "36"


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"requests_per_minute": 0}, "insufficient_quota"), ({"tokens_per_minute": 0}, "insufficient_quota")],
)
def test_openai_s_codes(limits: dict[str, Any], code: str) -> None:
    http = client(a=limits)
    refused = http.post("/v1/completions", json={}, headers={"Authorization": "Bearer a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, code)
    assert "Retry-After" not in refused.headers
    http = client(a={"requests_per_minute": 1})
    refused = [http.post("/v1/completions", json={}, headers={"Authorization": "Bearer a"}) for _ in range(2)][1]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_requests_at_a_time() -> None:
    model = Model("topics")
    app = application_of(tenants(a={"requests_at_a_time": 2}, b={}), model)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pliant") as http:

        async def status(key: str, text: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await http.post("/models/topics", json={"inputs": text}, headers=headers)).status_code

        waiting = [asyncio.create_task(status("a", "wait")) for _ in range(2)]
        await until(lambda: model.asked == 2)
        assert await status("a", "a") == 429
        assert await status("b", "a") == 200
        model.go_on.set()
        assert await asyncio.gather(*waiting) == [200, 200]
        assert await status("a", "a") == 200


def test_where_there_are_others_nobody_takes_all_places() -> None:
    alone = tenants({"max_ongoing_requests": 8}, a={})
    account = alone.accounts["a"]
    for _ in range(100):
        account.begin()
    account = tenants({"max_ongoing_requests": 8}, a={}, b={}).accounts["a"]
    for _ in range(6):
        account.begin()
    with pytest.raises(Exception, match="6 requests under way"):
        account.begin()


def test_each_of_several_gateways_enforces_its_part() -> None:
    http = TestClient(application_of(tenants({"replicas": 4}, a={"requests_per_minute": 8, "requests_at_a_time": 2})))
    assert [ask(http, "a").status_code for _ in range(3)] == [200, 200, 429]


def test_parts_follow_how_many_gateways_there_are() -> None:
    there = [1]
    config = ServingConfig(
        GatewayConfig(), {}, {"anonymous": TenantConfig(requests_per_minute=8, requests_at_a_time=4)}
    )
    account = Tenants(config, now=lambda: 0.0, gateways=lambda: there[0]).of("")
    assert account
    for _ in range(2):
        account.begin()
    there[0] = 2
    assert account.headers()["x-ratelimit-limit-requests"] == "4"
    with pytest.raises(Exception, match="2 requests under way"):
        account.begin()
    there[0] = 1
    account.begin()


def test_stats_show_tenants() -> None:
    http = client(a={"tokens_per_minute": 100, "rights": ["infer", "observe"]})
    ask(http, "a", text="abcd")
    ask(http, "a", "nowhere")
    facts = http.get("/stats", headers={"Authorization": "Bearer a"}).json()["tenants"]["a"]
    assert facts == {"open": 0, "tokens": 4, "requests": {"200": 1, "404": 1}, "remaining_tokens": 96}


def test_what_nobody_expected_counts_as_failed() -> None:
    class Broken(Model):
        async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
            raise KeyError("boom")

    found = tenants(a={"requests_per_minute": 9})
    http = TestClient(application_of(found, Broken("topics")), raise_server_exceptions=False)
    answer = ask(http, "a")
    assert (answer.status_code, answer.json()) == (500, {"error": "internal error: KeyError; see the log"})
    assert answer.headers["x-ratelimit-remaining-requests"] == "8"
    assert found.facts()["a"]["requests"] == {"500": 1}


def test_who_may_observe_and_asks_hears_what_took_how_long() -> None:
    class Asking(Model):
        async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
            with tracing.choosing():
                pass
            for reply in (Refusal("busy", 'full "now"\n'), "said"):
                asked = tracing.trial("topics", "r1", None, lambda _: {"pliant.runtime": 64, tracing.COMPUTE_MS: 0.0})
                if asked:
                    asked.over(reply)
                    asked.over(None)
            return await super().classify(texts, parameters)

    http = TestClient(application_of(tenants(sees={"rights": ["infer", "observe"]}, asks={}), Asking("topics")))

    def timing(key: str, **headers: str) -> str | None:
        sent = {"Authorization": f"Bearer {key}", **headers}
        return http.post("/models/topics", json={"inputs": "a"}, headers=sent).headers.get("server-timing")

    assert timing("sees") is None
    assert timing("asks", **{"x-pliant-timing": "true"}) is None
    told = timing("sees", **{"x-pliant-timing": "true"})
    assert told
    assert re.sub(r"[\d.]+(?=[;,]|$)", "N", told) == (
        'choose;dur=N, attempt;dur=N;desc="r1 of topics busy; reason full ?now??", '
        'attempt;dur=N;desc="r1 of topics answered; runtime 64", queue;dur=N, compute;dur=N'
    )
