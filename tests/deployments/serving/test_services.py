"""What a service waits for until it can answer, and who is told so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pliant.deployments.http.validation import finder
from pliant.deployments.serving.messages import STARTING, Step
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.services import Replicas, Service, Services
from pliant.deployments.serving.starting_replicas import StartingReplicas


class House:
    """A text classifier, a cascade over it, and a language model."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self.running, self.steps = 0, list[Step]()
        replicas = Replicas(wanted=lambda: 3, running=lambda: self.running, starting=lambda: self.steps)
        self.topics = Service("topics", "encoder", "texts", replicas)
        self.cascade = Service("topics-c", "cascade", "texts", parts=[self.topics])
        self.chat = Service("chat", "llm", "prompts")
        self.services = Services([self.topics, self.cascade, self.chat], patience_s)
        self.find = finder(self.services, "texts", "images")
        self.endpoint = SimpleNamespace(ready=False)

    async def refusal(self, name: str = "topics") -> str:
        with pytest.raises(RequestError) as caught:
            await self.find(name)
        assert caught.value.outcome == Outcome.UNAVAILABLE
        assert (caught.value.retry_after_s or 0) >= 1
        return caught.value.reason


async def test_a_service_says_what_it_waits_for_from_the_first_second_on() -> None:
    house = House()
    assert await house.refusal() == "topics is not ready yet: starting, 0 of 3 replicas"
    house.topics.opening("training", 0.4)
    assert await house.refusal() == "topics is not ready yet: training, 40%"
    assert await house.refusal("topics-c") == "topics-c is not ready yet: waits for topics (training, 40%)"
    house.steps = [Step(STARTING, 0.0)]
    assert house.topics.state == "training, 40%", "a replica that has nothing to say does not hide what a gateway does"
    house.steps = [Step("training", 0.5), Step("training", 0.45), Step("loading", 0.0)]
    assert house.topics.state == "training, 45%", "what most do, and the slowest of them"
    house.topics.open(house.endpoint)
    house.steps = [Step("loading", 0.0)]
    assert await house.refusal() == "topics is not ready yet: loading, 0 of 3 replicas"
    house.running = 2
    with pytest.raises(RequestError, match=r"not ready yet: topics \(loading, 2 of 3 replicas\), topics-c"):
        house.services.check_ready()
    assert (await house.find("topics")).endpoint is house.endpoint, "a gateway that starts may find replicas that move"


async def test_once_ready_it_is_asked_whatever_becomes_of_its_replicas() -> None:
    house = House()
    house.topics.open(house.endpoint)
    house.endpoint.ready, house.running = True, 2
    assert (await house.find("topics")).endpoint is house.endpoint
    assert house.topics.state == "ready, 2 of 3 replicas"
    house.steps = [Step(STARTING, 0.0)]
    assert house.topics.state == "ready, 2 of 3 replicas"
    house.steps = [Step("loading", 0.4)]
    assert house.topics.state == "ready, 2 of 3 replicas; loading, 40%"
    house.endpoint.ready, house.running = False, 0
    assert (await house.find("topics")).endpoint is house.endpoint, "requests wait for replicas that failed"
    assert not house.topics.facts()["ready"]


async def test_one_that_sleeps_is_asked_from_the_first_second_on_and_needs_nobody() -> None:
    wanted, running = 0, 0
    replicas = Replicas(lambda: wanted, lambda: running, list, least=0)
    service, endpoint = Service("chat", "llm", "prompts", replicas), SimpleNamespace(ready=False)
    services = Services([service], 0.0)
    assert not service.ready
    service.open(endpoint)
    assert (service.ready, service.state) == (True, "asleep; a request starts a replica")
    services.check_ready()
    assert await services.opened(service) is endpoint
    wanted = 1
    assert (service.ready, service.wakes, service.state) == (False, True, "starting, 0 of 1 replicas")
    services.check_ready()
    assert await services.opened(service) is endpoint, "it waits"
    running, endpoint.ready = 1, True
    assert (service.ready, service.wakes, service.state) == (True, False, "ready, 1 of 1 replicas")


async def test_what_is_made_of_one_that_sleeps_is_ready_and_needs_nobody_while_that_wakes() -> None:
    wanted = 0
    level = Service("small", "encoder", "texts", Replicas(lambda: wanted, lambda: 0, list, least=0))
    level.open(SimpleNamespace(ready=False))
    cascade = Service("c", "cascade", "texts", parts=[level])
    cascade.open(SimpleNamespace(ready=True))
    assert (cascade.ready, cascade.wakes) == (True, False)
    wanted, cascade.endpoint.ready = 1, False
    assert (cascade.ready, cascade.wakes) == (False, True)
    Services([level, cascade], 0.0).check_ready()


async def test_a_gateway_that_starts_hears_of_replicas_first() -> None:
    house = House(patience_s=60.0)
    house.topics.open(house.endpoint)
    asking = asyncio.create_task(house.find("topics"))
    await asyncio.sleep(0)
    house.endpoint.ready = True
    assert (await asking).endpoint is house.endpoint


async def test_a_gateway_that_opens_slowly_keeps_requests_for_replicas_that_run() -> None:
    house = House()
    house.running = 2
    asking = asyncio.create_task(house.find("topics"))
    await asyncio.sleep(0)
    assert not asking.done()
    house.topics.open(house.endpoint)
    assert (await asking).endpoint is house.endpoint


async def test_a_cascade_tells_by_itself_once_its_levels_are_there() -> None:
    house = House()
    house.cascade.open(SimpleNamespace(ready=False, state="profiles its levels: 5%", refused=True))
    assert (await house.find("topics-c")).endpoint
    assert house.cascade.facts() == {
        "kind": "cascade",
        "ready": False,
        "state": "profiles its levels: 5%",
        "done": None,
    }
    house.topics.open(SimpleNamespace(ready=True))
    house.chat.open(SimpleNamespace(ready=True))
    house.services.check_ready()  # a person has to see to the cascade first


async def test_other_names_and_kinds_are_unknown_at_once() -> None:
    house = House()
    with pytest.raises(RequestError, match="no model 'chat'; there are: topics, topics-c"):
        await house.find("chat")
    with pytest.raises(RequestError, match="no model 'topics'; there are: none"):
        await finder(house.services, "images")("topics")
    assert house.services.find("chat", "texts", "images") is None
    assert house.services.find("chat", "prompts") is house.chat


async def test_endpoints_are_found_by_what_they_answer() -> None:
    house = House()
    house.topics.open(house.endpoint)
    assert house.services.endpoints("texts") == {"topics": house.endpoint}, "the cascade has none yet"
    assert house.services.endpoints("images", "prompts") == {}


def test_a_replica_that_starts_is_forgotten_when_it_answers_or_ends() -> None:
    now = [0.0]
    starting = StartingReplicas(lambda: now[0])
    starting.hear("topics", "a", Step("training", 0.1))
    starting.hear("topics", "b", Step("loading", 0.0))
    starting.hear("chat", "c", Step("loading", 0.0))
    assert starting.now() == {
        "topics": {"a": Step("training", 0.1), "b": Step("loading", 0.0)},
        "chat": {"c": Step("loading", 0.0)},
    }
    starting.hear("topics", "b", None)
    starting.hear("topics", "b", None)
    assert starting.now()["topics"] == {"a": Step("training", 0.1)}
    now[0] = 60.0
    assert starting.now() == {}


def start(starting: StartingReplicas, now: list[float], replica: str, seconds: float) -> None:
    """Of `topics`; the replica says every five seconds that it loads."""
    ends = now[0] + seconds
    while now[0] < ends:
        starting.hear("topics", replica, Step("loading", 0.0))
        now[0] += min(5.0, ends - now[0])
    starting.hear("topics", replica, None)


def test_starts_are_measured_by_service_and_smoothed() -> None:
    now = [0.0]
    starting = StartingReplicas(lambda: now[0])
    now[0] = 60.0
    assert not starting.measured("topics")
    start(starting, now, "a", 8.0)
    assert starting.measured("topics")
    assert starting.seconds("topics") == pytest.approx(8.0)
    starting.hear("topics", "a", None)  # said again
    assert starting.seconds("topics") == pytest.approx(8.0)
    start(starting, now, "b", 24.0)
    assert starting.seconds("topics") == pytest.approx(16.0)
    assert not starting.measured("chat")
    assert starting.seconds("chat") == 30.0


def test_starts_that_may_have_begun_before_the_planner_or_that_fail_are_not_measured() -> None:
    now = [0.0]
    starting = StartingReplicas(lambda: now[0])
    start(starting, now, "first", 90.0)
    starting.hear("topics", "b", Step("loading", 0.0))
    now[0] += 3
    starting.hear("topics", "b", Step("failed: m", 0.0, failed=True))
    starting.hear("topics", "unheard of", None)
    assert not starting.measured("topics")


def test_why_replicas_failed_is_known_until_another_one_starts() -> None:
    now = [0.0]
    starting = StartingReplicas(lambda: now[0])
    failed = Step("failed: m: no config.json", 0.0, failed=True)
    starting.hear("topics", "a", failed)
    now[0] = 3600.0
    starting.hear("chat", "b", Step("loading", 0.5))
    assert starting.now() == {"topics": {"a": failed}, "chat": {"b": Step("loading", 0.5)}}
    starting.hear("topics", "c", Step("loading", 0.0))
    assert starting.now()["topics"] == {"c": Step("loading", 0.0)}
