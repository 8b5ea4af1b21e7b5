"""A route by the `openai` protocol: who answers, what becomes of failures, and how often all of it is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from support.passing import PassingRecorder, events, send, text
from support.peft_folders import adapter_folder, model_folder
from support.scripted import Replica, Replicas, language_model
from support.tenants import tenants

from pliant.config.cluster import GatewayConfig
from pliant.config.route import RouteConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Input, Prediction
from pliant.deployments.kinds import parse
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.llm.adapter_registry import AdapterRegistry
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.route.endpoint import Route
from pliant.deployments.route.kind import KIND
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.services import Service, Services
from pliant.deployments.serving.tenants import Account, act_for

pytestmark = pytest.mark.virtual_time

TO = {"mail": "post", "tests": "other"}
"""By label; `post` is an adapter."""
HANGS: Literal["hangs"] = "hangs"


class Classifier:
    """Finds the label `says` in every text."""

    name = "topics"
    labels = (*TO, "else")
    ready = True

    def __init__(self) -> None:
        self.says: str | RequestError = "mail"
        self.read: list[Input] = []

    async def classify(self, texts: Sequence[Input], parameters: ClassifyParameters) -> list[Prediction]:
        self.read += texts
        assert parameters.slo_ms == 1000
        if self.says == HANGS:
            await asyncio.Event().wait()
        if isinstance(self.says, RequestError):
            raise self.says
        await asyncio.sleep(0.2)
        return [Prediction([self.says], [0.9], None)]


class House:
    """A route over a classifier, two language models, and what adapters clients load for the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        adapters = {"roots": [str(folder / "roots")]}
        chat = {"kind": "llm", "model": model_folder(folder / "model"), "max_length": 64, "adapters": adapters}
        self._part = CatalogPart(AdapterRegistry(parse({"services": {"chat": chat}, "state": str(folder)})))
        self.classifier = Classifier()
        self.replicas = {name: Replicas(a=Replica(), b=Replica()) for name in ("chat", "other")}
        self.recorder = PassingRecorder()

    def gateway(self, *closed: str, keys: Any = None) -> httpx.AsyncClient:
        """One more, in which the services that are `closed` cannot answer yet."""
        topics = Service("topics", "encoder", "texts")
        models = {name: Service(name, "llm", "prompts") for name in self.replicas}
        route = Service("ask", "route", "prompts", parts=[topics, models["chat"]])
        config = RouteConfig(kind="route", by="topics", to=TO, otherwise="chat")
        self.route = Route("ask", config, topics, models["chat"], self.recorder)
        route.open(self.route)
        if "topics" not in closed:
            topics.open(self.classifier)
        for name, service in models.items():
            if name not in closed:
                model = language_model(self.folder, self.replicas[name])
                model.name = name
                service.open(model)
        services = Services([topics, *models.values(), route], patience_s=0)
        routers = LlmKind().routers(services, AdapterFollower(self._ask), GatewayConfig())
        app = application(GatewayConfig(), services, dict, bytes, routers, keys)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1")

    async def _ask(self, method: str, *args: Any) -> Any:
        """As `kind.Ask`."""
        return await getattr(self._part, method)(*args)

    async def load(self, http: httpx.AsyncClient) -> None:
        adapter_folder(self.folder / "roots" / "post")
        answer = await http.post("/load_lora_adapter", json={"lora_name": "post", "lora_path": "post"})
        assert answer.status_code == 200, answer.text

    def asked(self, name: str) -> list[str]:
        """Which adapters its replicas were asked for, "" for none."""
        return [each.adapter.name if each.adapter else "" for each in self.replicas[name].asked]


@pytest.fixture
async def house(tmp_path: Path) -> House:
    return House(tmp_path)


def chat(*said: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(said or ("hello",))]
    return {"model": "ask", "messages": messages, "max_tokens": 6, "temperature": 0, **more}


async def ask(http: httpx.AsyncClient, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    return await send(http, body or chat(), **headers)


@pytest.mark.parametrize(("label", "model"), [*TO.items(), ("else", "chat")])
@pytest.mark.parametrize(
    "body",
    [
        chat(),
        chat(stream=True),
        {"model": "ask", "prompt": "hello", "max_tokens": 6},
        {"model": "ask", "input": "hello", "max_output_tokens": 6},
    ],
    ids=["chat", "stream", "completion", "response"],
)
async def test_the_label_decides_who_answers(house: House, label: str, model: str, body: dict[str, Any]) -> None:
    async with house.gateway() as http:
        await house.load(http)
        house.classifier.says = label
        answer = await ask(http, body)
        assert answer.status_code == 200, answer.text
        assert "warning" not in answer.text
        assert house.asked("other" if model == "other" else "chat") == ["post" if model == "post" else ""]
        assert f'"model":"{model}"' in answer.text.replace(": ", ":")
    assert house.classifier.read == ["hello"]
    assert (house.recorder.events, house.recorder.ends) == ([model], [Outcome.OK])


async def test_what_the_user_said_last_decides(house: House) -> None:
    async with house.gateway() as http:
        await ask(http, chat("about mail", "yes?", "about tests"))
    assert house.classifier.read == ["about tests"]


BUSY = RequestError(Outcome.SHED, "too busy", 1.0)
LONG = RequestError(Outcome.REJECTED, "too long", fault=Fault.TOO_LONG)


@pytest.mark.parametrize(
    ("says", "reason"),
    [(HANGS, "late"), (BUSY, "busy"), (LONG, "failed"), (RequestError(Outcome.FAILED, "a bug"), "failed")],
)
async def test_without_the_classifier_otherwise_answers_and_says_so(house: House, says: Any, reason: str) -> None:
    async with house.gateway() as http:
        await house.load(http)
        house.classifier.says = says
        answer = (await ask(http)).json()
    assert answer["model"] == "chat"
    assert answer["warning"].startswith("chat answers, as topics ")
    assert (house.recorder.events, house.recorder.ends) == ([reason, "chat"], [Outcome.DEGRADED])


async def test_a_classifier_that_is_down_is_not_waited_for(house: House) -> None:
    house.classifier.ready = False
    async with house.gateway() as http:
        assert "topics is down" in (await ask(http)).json()["warning"]
    assert not house.classifier.read


async def test_what_nobody_waits_for_is_refused_until_the_classifier_has_time(house: House) -> None:
    house.classifier.says = BUSY
    act_for(Account(), background=True)
    async with house.gateway() as http:
        assert (await ask(http)).status_code == 429
    assert house.recorder.ends == [Outcome.SHED]


async def test_it_is_ready_when_somebody_can_answer_and_says_who_cannot(house: House) -> None:
    async with house.gateway("chat") as http:
        assert "ask (waits for chat" in (await http.get("http://test/health")).text
    house.classifier.ready = False
    async with house.gateway() as http:
        assert (await http.get("http://test/health")).status_code == 200


@pytest.mark.parametrize(("label", "closed"), [("mail", ()), ("tests", ("other",))], ids=["adapter", "model"])
async def test_who_is_not_there_yet_is_done_without(house: House, label: str, closed: tuple[str, ...]) -> None:
    house.classifier.says = label
    async with house.gateway(*closed) as http:
        answer = (await ask(http)).json()
        assert answer["warning"] == f"chat answers, as {TO[label]}, which was to, is not ready"
        assert house.recorder.events == ["absent", "chat"]
        if not closed:
            await house.load(http)
            assert (await ask(http)).json()["model"] == "post"


@pytest.mark.parametrize("label", [*TO, "else"])
async def test_with_nobody_there_it_says_what_is_waited_for(house: House, label: str) -> None:
    house.classifier.says = label
    async with house.gateway("chat", "other") as http:
        answer = await ask(http)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("chat is not ready yet")
    assert house.recorder.ends == [Outcome.UNAVAILABLE]


@pytest.mark.parametrize("label", [*TO, "else"])
async def test_a_stream_goes_on_where_it_came_from_whatever_the_classifier_says_by_then(
    house: House, label: str
) -> None:
    house.classifier.says = label
    async with house.gateway() as http:
        await house.load(http)
        whole = events(await ask(http, chat(stream=True)))
    base = "other" if label == "tests" else "chat"
    house.classifier.says = "mail" if label == "else" else "else"
    for index, (id, _) in enumerate(whole):
        async with house.gateway() as another:
            later = events(await ask(another, chat(stream=True), **{"Last-Event-ID": id})) if whole[index + 1 :] else []
        assert text(whole[: index + 1] + later) == text(whole)
    assert len(set(house.asked(base))) == 1
    assert len(house.asked(base)) == len(whole)
    assert len(house.classifier.read) == 1


async def test_a_stream_does_not_go_on_elsewhere(house: House) -> None:
    async with house.gateway() as http:
        await house.load(http)
        id = events(await ask(http, chat(stream=True)))[2][0]
        await http.post("/unload_lora_adapter", json={"lora_name": "post"})
        gone = await ask(http, chat(stream=True), **{"Last-Event-ID": id})
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
        strange = await ask(http, chat(stream=True), **{"Last-Event-ID": id[:-8] + "00000000"})
        assert strange.status_code == 409
        assert "ask again from the start" in strange.json()["error"]["message"]


async def test_a_replica_that_dies_changes_nothing(house: House) -> None:
    async with house.gateway() as http:
        await house.load(http)
        usual = (await ask(http)).json()
        house.replicas["chat"].replicas = {"a": Replica(dies_after=2), "b": Replica(dies_after=2), "c": Replica()}
        house.replicas["chat"].run("a", "b", "c")
        again = (await ask(http)).json()
    assert again["choices"] == usual["choices"]
    assert house.recorder.ends == [Outcome.OK, Outcome.OK]
    assert set(house.asked("chat")) == {"post"}


async def test_the_choice_takes_of_the_time_that_there_is(house: House) -> None:
    async with house.gateway() as http:
        await ask(http, {**chat(), "model": "chat"})
        house.classifier.says = "else"
        await ask(http)
    direct, routed = (each.first_token_within_s or 0.0 for each in house.replicas["chat"].asked)
    assert direct - routed == pytest.approx(0.2, abs=0.01)


async def test_a_refusal_of_who_answers_is_the_routes(house: House) -> None:
    house.classifier.says = "else"
    refusals = {name: Replica(gives=[Refusal("busy", "full", 7)]) for name in "ab"}
    house.replicas["chat"].replicas = dict(refusals)
    async with house.gateway() as http:
        answer = await ask(http)
    assert answer.status_code == 429
    assert house.recorder.ends == [Outcome.SHED]


async def test_each_answer_is_counted_and_a_client_that_leaves(house: House) -> None:
    house.classifier.says = "else"
    async with house.gateway() as http:
        await ask(http, chat(n=3))
        assert house.recorder.ends == [Outcome.OK] * 3
        house.classifier.says = HANGS
        asking = asyncio.create_task(ask(http))
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.wait([asking])
    assert house.recorder.ends[3:] == [Outcome.CANCELLED]


async def test_a_key_needs_the_right_to_the_route_alone(house: House) -> None:
    house.classifier.says = "else"
    keys = tenants(its={"services": ["ask"]}, others={"services": ["chat", "topics", "other"]})
    async with house.gateway(keys=keys) as http:
        its, others = ({"Authorization": f"Bearer {name}"} for name in ("its", "others"))
        assert (await ask(http, **its)).status_code == 200
        assert (await ask(http, {**chat(), "model": "chat"}, **its)).status_code == 403
        assert (await ask(http, **others)).status_code == 403
        assert (await ask(http, {**chat(), "model": "chat"}, **others)).status_code == 200


async def test_what_the_console_and_prometheus_show(house: House) -> None:
    async with house.gateway() as http:
        await ask(http)
        house.classifier.says = "tests"
        await ask(http)
    facts = house.route.facts()
    assert (facts["passed"], facts["instead"]) == ({"chat": 1, "other": 1}, {"absent": 1})
    samples = [sample for metric in KIND.metrics({"ask": facts, "new": {}}) for sample in metric.samples]
    assert [(sample.labels, sample.value) for sample in samples] == [
        ({"service": "ask", "model": "chat"}, 1),
        ({"service": "ask", "model": "other"}, 1),
        ({"service": "ask", "reason": "absent"}, 1),
    ]
    shown: Any = list(KIND.panels(facts, Past([])))
    assert [panel.bars for panel in shown] == [facts["passed"], facts["instead"]]
    assert not list(KIND.panels({}, Past([])))


@pytest.mark.parametrize("prompt", [[1, 2], ["a", "b"], [[1], [2]]])
async def test_it_takes_one_text(house: House, prompt: Any) -> None:
    async with house.gateway() as http:
        answer = await ask(http, {"model": "ask", "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "one text a request" in answer.json()["error"]["message"]


async def test_it_is_listed_and_has_no_tokens(house: House) -> None:
    async with house.gateway() as http:
        cards = {card["id"]: card for card in (await http.get("/models")).json()["data"]}
        assert cards["ask"]["max_model_len"] == 64
        assert (await http.get("/models/ask")).json() == cards["ask"]
        answer = await http.post("http://test/tokenize", json={"model": "ask", "prompt": "a"})
    assert answer.status_code == 400
    assert "ask is a route" in answer.json()["error"]["message"]
