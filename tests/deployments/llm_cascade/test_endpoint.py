"""A cascade of language models by the `openai` protocol: who answers, what becomes of failures, and what is counted."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.passing import PassingRecorder, events, send, text
from support.scripted import Replica, Replicas, language_model, said
from support.tenants import tenants

from pliant.config.cluster import GatewayConfig
from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.deployments.http.application import application
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.request import Piece
from pliant.deployments.llm_cascade.endpoint import LlmCascade
from pliant.deployments.llm_cascade.kind import KIND
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.services import Service, Services
from pliant.deployments.serving.tenants import Account, act_for
from pliant.policies.cascade.escalation import Escalation, Rule

pytestmark = pytest.mark.virtual_time

RULE = Rule(4, "mean", 0.8)
CHOICE = Escalation(RULE, 0.6, 0.005, 0.55, 1000, 900)
SURE, UNSURE = math.log(0.9), math.log(0.7)


class House:
    """A cascade of `small` and `large`, of which `small` finds each of its tokens as likely as `self.sure`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replicas = {name: Replicas(a=Replica(), b=Replica()) for name in ("small", "large")}
        self.recorder = PassingRecorder()
        self.entry: Chosen | None = Chosen("asked", "serves small → large", CHOICE)
        self.sure(SURE)

    def sure(self, logprob: float) -> None:
        for replica in self.replicas["small"].replicas.values():
            replica.logprob = logprob

    def gateway(self, *closed: str, keys: Any = None) -> httpx.AsyncClient:
        """One more, in which the services that are `closed` cannot answer yet."""
        models = {name: Service(name, "llm", "prompts") for name in self.replicas}
        asked = Service("asked", "llm-cascade", "prompts", parts=list(models.values()))
        config = LlmCascadeConfig(kind="llm-cascade", levels=("small", "large"), data="d")
        self.cascade = LlmCascade("asked", config, models["small"], models["large"], lambda: self.entry, self.recorder)
        asked.open(self.cascade)
        for name, service in models.items():
            if name not in closed:
                model = language_model(self.folder, self.replicas[name])
                model.name = name
                service.open(model)
        services = Services([*models.values(), asked], patience_s=0)
        routers = LlmKind().routers(services, None, GatewayConfig())
        app = application(GatewayConfig(), services, dict, bytes, routers, keys)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1")

    def asked(self, name: str) -> int:
        """How often its replicas were asked for something."""
        return len(self.replicas[name].asked)


@pytest.fixture
async def house(tmp_path: Path) -> House:
    return House(tmp_path)


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "asked", "messages": messages, "max_tokens": 6, "temperature": 0, **more}


async def ask(http: httpx.AsyncClient, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    return await send(http, body or chat(), **headers)


async def leave(house: House) -> None:
    """Ask, and do not wait for the answer."""
    async with house.gateway() as http:
        asking = asyncio.create_task(ask(http))
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.wait([asking])


BODIES = [
    chat(),
    chat(stream=True),
    chat(temperature=1, seed=3, n=2, logprobs=True),
    {"model": "asked", "prompt": "hello", "max_tokens": 6},
    {"model": "asked", "input": "hello", "max_output_tokens": 6},
]


@pytest.mark.parametrize(("logprob", "model"), [(SURE, "small"), (UNSURE, "large")])
@pytest.mark.parametrize("body", BODIES, ids=["chat", "stream", "sampled", "completion", "response"])
async def test_the_small_model_answers_what_it_is_sure_of(
    house: House, logprob: float, model: str, body: dict[str, Any]
) -> None:
    house.sure(logprob)
    async with house.gateway() as http:
        answer = await ask(http, body)
        assert answer.status_code == 200, answer.text
        assert "warning" not in answer.text
        assert f'"model":"{model}"' in answer.text.replace(": ", ":")
        alone = await ask(http, {**body, "model": model}, **{"x-request-id": "one"})
        assert alone.status_code == 200
    beginning = house.replicas["small"].asked[0]
    assert (beginning.sampling.greedy, beginning.sampling.logprobs) == (True, 0)
    assert house.recorder.events == [model]
    assert set(house.recorder.ends) == {Outcome.OK}
    assert all(replica.live == 0 for replica in house.replicas["small"].replicas.values()), "nothing goes on for nobody"


SAMPLED = {"temperature": 1, "seed": 3}


@pytest.mark.parametrize(
    ("more", "kept"),
    [({}, True), ({"logprobs": True, "top_logprobs": 2}, True), (SAMPLED, False), ({"n": 2}, False)],
    ids=["likeliest", "with log probabilities", "sampled", "two"],
)
async def test_the_beginning_goes_on_if_it_is_that_of_the_answer(
    house: House, more: dict[str, Any], kept: bool
) -> None:
    async with house.gateway() as http:
        found = (await ask(http, chat(**more))).json()
        beginning, *others = house.replicas["small"].asked
        alone = (await ask(http, {**chat(**more), "model": "small"})).json()
    assert len(others) == (0 if kept else more.get("n", 1))
    assert beginning.max_tokens == (6 if kept else RULE.tokens)
    assert found["choices"] == alone["choices"]
    assert found["usage"] == alone["usage"]
    assert set(house.recorder.ends) == {Outcome.OK}


async def test_a_beginning_goes_on_elsewhere_when_its_replica_dies(house: House) -> None:
    house.replicas["small"].replicas["a"].dies_after = 5
    house.replicas["small"].replicas["b"].dies_after = 5
    house.replicas["small"].start("c", Replica(logprob=SURE))
    house.replicas["small"].run("a", "c")
    async with house.gateway() as http:
        found = (await ask(http)).json()
    generation = house.replicas["small"].asked[0]
    assert found["choices"][0]["message"]["content"] == said(generation)


async def test_a_client_that_leaves_ends_an_answer_that_went_on(house: House) -> None:
    for replica in house.replicas["small"].replicas.values():
        replica.hangs_after = 5
    await leave(house)
    assert house.recorder.ends == [Outcome.CANCELLED]
    assert all(replica.live == 0 for replica in house.replicas["small"].replicas.values())


@pytest.mark.parametrize(
    ("entry", "state"),
    [
        (None, "large answers all; waits for the planner"),
        (Chosen("asked", "profiles its models: 40%"), "large answers all; profiles its models: 40%"),
        (Chosen("asked", "serves large alone", CHOICE._replace(rule=None)), "serves large alone"),
    ],
)
async def test_without_a_rule_the_large_model_answers_everything(house: House, entry: Any, state: str) -> None:
    house.entry = entry
    async with house.gateway() as http:
        assert (await ask(http)).json()["model"] == "large"
    assert house.cascade.state == state
    assert house.asked("small") == 0
    assert house.recorder.events == ["large"]


FULL = Replica(gives=[Refusal("busy", "full", 7, Outcome.SHED)])
BROKEN = Replica(gives=[Refusal("failed", "a bug")])
HANGING = Replica(hangs_after=2)


@pytest.mark.parametrize(
    ("replica", "reason"), [(FULL, "busy"), (BROKEN, "failed"), (HANGING, "late")], ids=["full", "broken", "hanging"]
)
async def test_without_the_small_model_the_large_one_answers(house: House, replica: Replica, reason: str) -> None:
    house.replicas["small"].replicas = {"a": replica, "b": replica}
    async with house.gateway() as http:
        answer = await ask(http)
    assert answer.json()["model"] == "large"
    assert "warning" not in answer.json(), "nobody got less than he asked for"
    assert house.recorder.events == [reason, "large"]
    assert house.recorder.ends == [Outcome.OK]
    assert all(replica.live == 0 for replica in house.replicas["small"].replicas.values()), "nothing goes on for nobody"


async def test_a_beginning_that_ends_at_once_is_not_sure(house: House) -> None:
    empty = Replica(gives=[Piece((), "", (), "stop", 0.001, 0)])
    house.replicas["small"].replicas = {"a": empty, "b": empty}
    async with house.gateway() as http:
        assert (await ask(http)).json()["model"] == "large"
    assert house.recorder.ends == [Outcome.OK]


@pytest.mark.parametrize("closed", [True, False])
async def test_a_small_model_that_is_down_is_not_waited_for(house: House, closed: bool) -> None:
    if not closed:
        house.replicas["small"].run()
    async with house.gateway(*["small"] * closed) as http:
        assert (await ask(http)).json()["model"] == "large"
        assert (await http.get("http://test/v2/health/live")).status_code == 200
    assert house.recorder.events == ["down", "large"]


async def test_without_the_large_model_it_is_not_ready(house: House) -> None:
    house.sure(UNSURE)
    async with house.gateway("large") as http:
        answer = await ask(http)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith("large is not ready yet")
        assert "asked (waits for large" in (await http.get("http://test/health")).text
    assert house.recorder.ends == [Outcome.UNAVAILABLE]


async def test_what_nobody_waits_for_is_refused_until_the_small_model_has_time(house: House) -> None:
    house.replicas["small"].replicas = {"a": FULL, "b": FULL}
    act_for(Account(), background=True)
    async with house.gateway() as http:
        assert (await ask(http)).status_code == 429
    assert house.recorder.ends == [Outcome.SHED]


async def test_bad_requests_are_refused_whoever_would_answer(house: House) -> None:
    async with house.gateway() as http:
        long = await ask(http, chat(max_tokens=600))
        two = await ask(http, {"model": "asked", "prompt": ["a", "b"]})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert two.status_code == 400


@pytest.mark.parametrize(("logprob", "model"), [(SURE, "small"), (UNSURE, "large")])
async def test_a_stream_goes_on_where_it_came_from_though_the_rule_is_another_by_then(
    house: House, logprob: float, model: str
) -> None:
    house.sure(logprob)
    async with house.gateway() as http:
        whole = events(await ask(http, chat(stream=True)))
        house.sure(UNSURE if logprob == SURE else SURE)
        asked = {name: house.asked(name) for name in house.replicas}
        later = events(await ask(http, chat(stream=True), **{"Last-Event-ID": whole[2][0]}))
    assert text(whole[:3] + later) == text(whole)
    other = "large" if model == "small" else "small"
    assert house.asked(other) == asked[other]


async def test_the_beginning_takes_of_the_time_that_there_is(house: House) -> None:
    house.sure(UNSURE)
    for replica in house.replicas["small"].replicas.values():
        replica.pause_s = 0.05
    async with house.gateway() as http:
        await ask(http, {**chat(), "model": "large"})
        await ask(http)
    direct, passed = (each.first_token_within_s or 0.0 for each in house.replicas["large"].asked)
    assert direct - passed == pytest.approx(0.2, abs=0.02)


async def test_a_client_that_leaves_ends_the_beginning(house: House) -> None:
    house.replicas["small"].replicas = {"a": HANGING, "b": HANGING}
    await leave(house)
    assert house.recorder.ends == [Outcome.CANCELLED]
    assert HANGING.live == 0


async def test_a_request_that_is_refused_after_the_choice_leaves_nothing_under_way(house: House) -> None:
    async with house.gateway() as http:
        assert (await ask(http, chat(stream=True), **{"Last-Event-ID": "nonsense"})).status_code == 400
        await asyncio.sleep(0)
    assert all(replica.live == 0 for replica in house.replicas["small"].replicas.values())


async def test_a_key_needs_the_right_to_the_cascade_alone(house: House) -> None:
    keys = tenants(its={"services": ["asked"]}, others={"services": ["small", "large"]})
    async with house.gateway(keys=keys) as http:
        its, others = ({"Authorization": f"Bearer {name}"} for name in ("its", "others"))
        assert (await ask(http, **its)).status_code == 200
        assert (await ask(http, {**chat(), "model": "small"}, **its)).status_code == 403
        assert (await ask(http, **others)).status_code == 403


async def test_what_the_console_and_prometheus_show(house: House) -> None:
    async with house.gateway() as http:
        await ask(http)
        house.replicas["small"].run()
        await ask(http)
    facts = house.cascade.facts()
    assert (facts["passed"], facts["instead"]) == ({"small": 1, "large": 1}, {"down": 1})
    assert facts["chosen"]["rule"] == "mean probability of its first 4 tokens >= 0.8"
    json.dumps(facts)
    samples = [sample for metric in KIND.metrics({"asked": facts, "new": {}}) for sample in metric.samples]
    assert [(sample.labels, sample.value) for sample in samples] == [
        ({"service": "asked", "model": "small"}, 1),
        ({"service": "asked", "model": "large"}, 1),
        ({"service": "asked", "reason": "down"}, 1),
    ]
    shown: Any = list(KIND.panels(facts, Past([])))
    assert [panel.bars for panel in shown] == [facts["passed"], facts["instead"]]
    assert not list(KIND.panels({}, Past([])))


async def test_it_is_listed_and_has_no_tokens(house: House) -> None:
    async with house.gateway() as http:
        cards = {card["id"]: card for card in (await http.get("/models")).json()["data"]}
        assert cards["asked"]["max_model_len"] == 64
        answer = await http.post("http://test/tokenize", json={"model": "asked", "prompt": "a"})
    assert answer.status_code == 400
