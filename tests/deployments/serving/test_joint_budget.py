"""One budget for texts, chat and images, in virtual time: places move with the load, calmly; a restart keeps them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from support.scripted import report as chat_report
from support.scripted_vision import report as image_report

from pliant.config.cluster import ServingConfig
from pliant.deployments.encoder.valuer import TextValuer
from pliant.deployments.kinds import parse
from pliant.deployments.llm.valuer import AnswerValuer
from pliant.deployments.serving.joint_budget import PERIOD_S, SETTLED_S, SLEEPS_AFTER_S, JointBudget
from pliant.deployments.serving.least_held import LeastHeld
from pliant.deployments.serving.messages import STARTING, News, Step
from pliant.deployments.serving.starting_replicas import StartingReplicas
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.valuer import Valuer
from pliant.deployments.vision.valuer import ImageValuer
from pliant.policies.cluster.baselines import Greedy
from pliant.policies.cluster.budget import Nodes
from pliant.policies.cluster.control import Decision, Offer
from pliant.policies.cluster.forecast import LOOK_S, Forecast
from pliant.policies.encoder.service_curve import ServiceCurve

TEXT_S = 0.05
PROMPT, ANSWER = 100, 50
STEP_S, ROW_S, SLOTS = 0.02, 0.002, 8
CHAT_EACH = SLOTS / (ANSWER * (STEP_S + ROW_S * SLOTS))
"""Requests per second that a replica carries, about."""
IMAGES = [(0.005, 0.6), (0.01, 0.9), (0.02, 1.0)]
"""Seconds and utility of each, by gamma."""

Demand = Callable[[float], Mapping[str, float]]


def serving(
    cpus: float = 6.0,
    images: Mapping[str, Any] | None = None,
    policy: str = "joint",
    gateway: float = 0.0,
    **changes: Any,
) -> ServingConfig:
    photos = {"photos": {"kind": "vision", "model": "m", **images}} if images else {}
    return parse(
        {
            "gateway": {"cpus": gateway, "replicas": {"min": 1, "max": 4}},
            "budget": {"nodes": [{"cpus": cpus + 0.5}], "policy": policy},
            "services": {
                "texts": {"kind": "encoder", "model": "m", "replicas": {"min": 1, "max": 5}, "slo_ms": 500, **changes},
                "chat": {"kind": "llm", "model": "m", "replicas": {"min": 1, "max": 5}, "slo_ms": 5000},
                **photos,
            },
        }
    )


class Cluster:
    """Replicas that start and stop at once, and a gateway whose news are of the demand."""

    def __init__(self, config: ServingConfig, seed: int = 0) -> None:
        self.now = 0.0
        self.gateways = 1
        self.gpus = 0
        self.counts = {name: sizes.min for name, each in config.services.items() if (sizes := each.replica_range())}
        self.history: list[dict[str, int]] = []
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._made = 0
        self._cpus = config.budget.nodes[0].cpus if config.budget and config.budget.nodes else 0.0
        self.restart()

    def restart(self) -> None:
        """The planner is another one from now on."""
        self.tables: dict[str, ReplicaTable[Any, Any]] = {name: ReplicaTable(LeastHeld()) for name in self.counts}
        self._loads = dict.fromkeys(self.counts, 0.0)
        self.starting = StartingReplicas(lambda: self.now)
        self.budget = JointBudget(
            self._config,
            self._valuers(),
            self.tables,
            self.starting,
            self._nodes,
            lambda: self.gateways,
            lambda: self.now,
        )

    def _valuers(self) -> dict[str, Valuer[Any]]:
        services = self._config.services
        made: dict[str, Valuer[Any]] = {
            "texts": TextValuer(services["texts"]),  # type: ignore[arg-type]
            "chat": AnswerValuer(services["chat"]),  # type: ignore[arg-type]
        }
        return {**made, "photos": ImageValuer()} if "photos" in services else made

    async def run(self, seconds: float, demand: Demand) -> None:
        end = self.now + seconds
        while self.now < end:
            self._report()
            rates = demand(self.now)
            texts, chats = (int(self._rng.poisson(rates[name] * PERIOD_S)) for name in ("texts", "chat"))
            self._loads = dict(rates)
            self.budget.hear("texts", News(arrived=Counter({40: texts})))
            self.budget.hear("chat", News(arrived=Counter({PROMPT: chats}), answered=chats, tokens=ANSWER * chats))
            self.budget.hear("photos", News(arrived=Counter({1: self._rng.poisson(rates.get("photos", 0) * PERIOD_S)})))
            self.now += PERIOD_S
            await self.budget.step()
            for name, wanted in self.budget.wanted().items():
                sizes = self._config.services[name].replica_range()
                assert sizes
                assert sizes.min <= wanted <= sizes.max
                self.counts[name] = wanted
            assert sum(self.counts.values()) <= self._cpus
            self.history.append(dict(self.counts))

    def moves(self, name: str, since: int = 0) -> int:
        counts = [each[name] for each in self.history[since:]]
        return sum(before != after for before, after in pairwise(counts))

    async def _nodes(self) -> list[Nodes]:
        return [Nodes(1, self.gpus, self._cpus)]

    def _report(self) -> None:
        each = self._loads["chat"] / self.counts["chat"]
        live = min(SLOTS, max(1.0, ANSWER * each * STEP_S / max(0.1, 1 - ANSWER * each * ROW_S)))
        step_s = STEP_S + ROW_S * live
        chat = {**chat_report(), "slots": SLOTS, "step_ms": 1e3 * step_s, "prompt_tokens_per_s": 5000.0}
        chat["tokens_per_s"] = live / step_s
        chat["memory"] = {**chat["memory"], "pages": 1000, "page": 16}  # type: ignore[dict-item]
        text = {"version": 0, "held": {}, "served": 0, "curve": ((64, TEXT_S, TEXT_S),), "shares": (), "resident": True}
        photo = {**image_report(), "earnings": IMAGES, "slo_s": 1.0}
        said = {"texts": text, "chat": chat, "photos": photo}
        for name, count in self.counts.items():
            self.tables[name].sync({f"{name}-{index}": said[name] for index in range(count)})


def steady(texts: float, chat: float) -> Demand:
    return lambda _: {"texts": texts, "chat": chat}


def reasons(cluster: Cluster, name: str) -> str:
    return str(cluster.budget.facts(name)["wanted_because"])


async def test_places_move_from_texts_to_chat_with_the_load() -> None:
    cluster = Cluster(serving())
    await cluster.run(600, steady(60, 0.3))
    assert cluster.counts["texts"] >= 4
    assert cluster.counts["chat"] == 1
    await cluster.run(120, steady(3, 3.5 * CHAT_EACH))
    assert cluster.counts["chat"] >= 4
    assert "took" in reasons(cluster, "chat")
    assert "from texts" in reasons(cluster, "chat")
    await cluster.run(300, steady(3, 3.5 * CHAT_EACH))
    assert cluster.counts == {"texts": 1, "chat": 5}
    facts = cluster.budget.facts("chat")["budget"]
    assert facts["demand_per_s"] == pytest.approx(3.5 * CHAT_EACH, rel=0.4)
    assert facts["in_time"] > 0.7  # forecasts were wrong by much, and so may the next ones be


@pytest.mark.parametrize("policy", ["independent", "greedy", f"{__name__}:Chatty"])
async def test_another_policy_decides_by_its_name(policy: str) -> None:
    cluster = Cluster(serving(policy=policy))
    await cluster.run(600, steady(3, 4 * CHAT_EACH))
    assert cluster.counts["chat"] >= 4
    assert cluster.counts["texts"] == 1
    assert "of what it could earn" in reasons(cluster, "chat")


class Chatty(Greedy):
    """As somebody else's module would have it."""


class Broken:
    """Gives what a service may not have, or nothing."""

    replicas: ClassVar[Mapping[str, int]] = {}

    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision:
        return Decision(self.replicas, (), (), {})


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ({"texts": 9, "chat": 1}, "texts may have 1 to 5 replicas, got 9"),
        ({"texts": 1, "chat": 0}, "chat may have 1 to 5 replicas, got 0"),
        ({"texts": 1}, "chat may have 1 to 5 replicas, got None"),
        ({"texts": 1, "chat": np.ceil(1.5)}, "chat may have 1 to 5 replicas, got np.float64(2.0)"),
    ],
)
async def test_a_policy_that_fails_changes_nothing_and_stats_say_so(
    monkeypatch: pytest.MonkeyPatch, replicas: dict[str, int], says: str
) -> None:
    monkeypatch.setattr(Broken, "replicas", {"texts": 2, "chat": 2})
    cluster = Cluster(serving(policy=f"{__name__}:Broken"))
    await cluster.run(300, steady(3, CHAT_EACH))
    assert cluster.counts == {"texts": 2, "chat": 2}
    monkeypatch.setattr(Broken, "replicas", replicas)
    await cluster.run(60, steady(3, CHAT_EACH))
    assert cluster.counts == {"texts": 2, "chat": 2}
    assert says in reasons(cluster, "texts")


async def test_a_policy_may_count_in_numbers_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "replicas", {"texts": np.int64(2), "chat": np.int64(3)})
    cluster = Cluster(serving(policy=f"{__name__}:Broken"))
    await cluster.run(100, steady(3, CHAT_EACH))
    assert cluster.counts == {"texts": 2, "chat": 3}
    assert json.loads(json.dumps(cluster.budget.facts("chat")))["wanted_replicas"] == 3


async def test_a_value_error_of_a_policy_of_ones_own_is_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(*_: object) -> Decision:
        raise ValueError("no such tenant")

    monkeypatch.setattr(Broken, "decide", decide)
    cluster = Cluster(serving(policy=f"{__name__}:Broken"))
    await cluster.run(100, steady(3, CHAT_EACH))
    assert f"policy {__name__}:Broken failed: no such tenant; nothing changes" in reasons(cluster, "texts")


async def test_places_move_to_images_and_back() -> None:
    cluster = Cluster(serving(7, images={"replicas": {"min": 1, "max": 5}}))
    quiet = {"texts": 3.0, "chat": 0.1, "photos": 1.0}
    await cluster.run(600, lambda _: {**quiet, "photos": 180.0})
    assert cluster.counts == {"texts": 1, "chat": 1, "photos": 5}
    facts = cluster.budget.facts("photos")["budget"]
    assert facts["in_time"] > 0.9, "of what images earn at best, as most have a lower gamma"
    assert "of what it could earn" in reasons(cluster, "photos")
    await cluster.run(900, lambda _: {**quiet, "texts": 60.0})
    assert cluster.counts["texts"] >= 4
    assert cluster.counts["photos"] == 1


@pytest.mark.parametrize("homes", [(512,), (32, 512)])
def test_replicas_that_hold_a_set_of_runtimes_take_each_text_on_the_shortest(homes: tuple[int, ...]) -> None:
    seconds = {32: 0.005, 128: 0.02, 512: 0.1}
    curve = ServiceCurve.of_set({length: ServiceCurve.constant(each) for length, each in seconds.items()})
    report = {"curve": curve.points, "shares": curve.shares, "resident": False, "max_length": 512}
    valuer = TextValuer(serving().services["texts"])  # type: ignore[arg-type]
    valuer.hear(News(arrived=Counter({20: 900, 100: 90, 500: 10})))
    value = valuer.value([{**report, "home": home} for home in homes], 100, 0.0, 3)  # type: ignore[typeddict-item]
    assert value is not None
    assert value.busy == pytest.approx(90 * 0.005 + 9 * 0.02 + 1 * 0.1)
    assert value.in_time[1] > 0.99


async def test_images_of_which_nothing_is_known_keep_their_replicas() -> None:
    valuer = ImageValuer()
    report = {**image_report(), "earnings": IMAGES, "slo_s": 1.0}
    assert valuer.value([image_report()], 10, 0.0, 3) is None
    old = {key: said for key, said in image_report().items() if key != "earnings"}
    assert valuer.value([old], 10, 0.0, 3) is None  # type: ignore[list-item]
    value = valuer.value([report, image_report()], 200, 0.0, 8)  # type: ignore[list-item]
    assert value is not None
    curve, busy = value
    assert busy == pytest.approx(4), "with the best gamma"
    assert curve[0] == 0
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == pytest.approx(1)


async def test_a_batch_service_gets_what_others_leave() -> None:
    cluster = Cluster(serving(weight=10, **{"class": "batch"}))
    await cluster.run(600, steady(90, 0.3))
    assert cluster.counts["texts"] == 5, "nobody else has a use for them"
    assert cluster.counts["chat"] == 1
    await cluster.run(600, steady(90, 3.5 * CHAT_EACH))
    assert cluster.counts["chat"] == 5
    assert cluster.counts["texts"] == 1
    equal = Cluster(serving(weight=10))
    await equal.run(1200, steady(90, 3.5 * CHAT_EACH))
    assert equal.counts["texts"] == 5


async def test_a_service_sleeps_after_a_quiet_time_and_wakes_at_once() -> None:
    cluster = Cluster(serving(replicas={"min": 0, "max": 5}))
    assert cluster.counts["texts"] == 0
    assert cluster.budget.facts("texts")["wanted_replicas"] == 0
    cluster.budget.hear("texts", News(arrived=Counter({40: 1})))
    assert cluster.budget.wanted() == {"texts": 1}
    cluster.counts["texts"] = 1
    await cluster.run(300, steady(60, 0.3))
    assert cluster.counts["texts"] >= 3
    await cluster.run(SLEEPS_AFTER_S - 3 * PERIOD_S, steady(0, 0.3))
    assert cluster.counts["texts"] == 1, "something may come"
    await cluster.run(4 * PERIOD_S, steady(0, 0.3))
    assert cluster.counts["texts"] == 0
    await cluster.run(600, steady(0, 0.3))
    assert cluster.counts == {"texts": 0, "chat": 1}
    cluster.budget.hear("texts", News(arrived=Counter({40: 1})))
    assert cluster.budget.wanted()["texts"] == 1
    assert cluster.budget.facts("texts")["wanted_because"] == "it was asleep, and is asked for something"


async def test_a_service_that_was_woken_but_never_starts_is_given_up_when_nobody_asks_any_more() -> None:
    cluster = Cluster(serving(replicas={"min": 0, "max": 5}))
    cluster.budget.hear("texts", News(arrived=Counter({40: 1})))

    async def periods(seconds: float) -> None:
        for _ in range(int(seconds / PERIOD_S)):
            cluster.now += PERIOD_S
            await cluster.budget.step()

    await periods(SLEEPS_AFTER_S - PERIOD_S)
    assert cluster.budget.wanted()["texts"] == 1, "its start may take long"
    await periods(2 * PERIOD_S)
    assert cluster.budget.wanted()["texts"] == 0
    assert reasons(cluster, "texts") == "it has not started, and is not asked for any more"
    cluster.budget.hear("texts", News(arrived=Counter({40: 1})))
    assert cluster.budget.wanted()["texts"] == 1


async def test_a_service_that_is_asked_now_and_then_stays_awake() -> None:
    cluster = Cluster(serving(replicas={"min": 0, "max": 5}))
    cluster.budget.hear("texts", News(arrived=Counter({40: 1})))
    cluster.counts["texts"] = 1
    for _ in range(10):
        cluster.budget.hear("texts", News(arrived=Counter({40: 1})))
        await cluster.run(SLEEPS_AFTER_S - 2 * PERIOD_S, steady(0, 3.5 * CHAT_EACH))
        assert cluster.counts["texts"] == 1


async def test_what_a_cascade_asks_is_said_of_its_levels() -> None:
    cluster = Cluster(serving())
    for seconds, asked in ((300, 40), (120, 0)):
        end = cluster.now + seconds
        while cluster.now < end:
            cluster.budget.hear("sure", News(arrived=Counter({8: asked}), asked=Counter({"texts": asked})))
            await cluster.run(PERIOD_S, steady(10, 0.3))
        said = cluster.budget.facts("texts")["budget"]["of_these_by"]
        assert said == {"sure": asked / PERIOD_S}, "it is part of the 10 that arrived, and adds nothing to them"
        assert cluster.budget.facts("chat")["budget"]["of_these_by"] == {}
    assert cluster.budget.facts("texts")["budget"]["demand_per_s"] == pytest.approx(10, rel=0.3)


async def test_replicas_that_do_half_of_what_was_foreseen_are_counted_so() -> None:
    cluster = Cluster(serving(cpus=8.0))
    asked, each = 30, 0.5 / TEXT_S
    for _ in range(100):
        answered = min(asked, cluster.counts["texts"] * each)
        seen = News(answered=int(answered * PERIOD_S), shed=int((asked - answered) * PERIOD_S))
        cluster.budget.hear("texts", seen)
        await cluster.run(PERIOD_S, steady(asked, 0.3))
    assert cluster.counts["texts"] >= asked / each
    assert cluster.counts["chat"] == 1
    facts = cluster.budget.facts("texts")
    assert facts["budget"]["correction"] > 1.5
    assert facts["budget"]["measured_in_time"] == pytest.approx(1.0, abs=0.05)
    assert "so its demand counts" in facts["wanted_because"]


async def test_demand_that_stays_moves_nothing() -> None:
    cluster = Cluster(serving())
    await cluster.run(600, steady(30, CHAT_EACH))
    await cluster.run(3600, steady(30, CHAT_EACH))
    assert cluster.moves("texts", since=60) + cluster.moves("chat", since=60) <= 2


@pytest.mark.parametrize("period_s", [60, 300, 900])
async def test_square_waves_do_not_flap(period_s: float) -> None:
    cluster = Cluster(serving())
    await cluster.run(7200, lambda now: {"texts": 70 if now % period_s < period_s / 2 else 10, "chat": CHAT_EACH})
    assert cluster.moves("texts") <= 2 * 6 + 12
    assert cluster.moves("chat") <= 2 * 6 + 12


async def test_replicas_go_when_nothing_is_asked_any_more() -> None:
    cluster = Cluster(serving())
    await cluster.run(600, steady(60, 0.3))
    await cluster.run(1200, steady(0, 0))
    assert cluster.counts == {"texts": 1, "chat": 1}


async def test_a_planner_that_starts_anew_keeps_what_runs() -> None:
    cluster = Cluster(serving())
    await cluster.run(600, steady(60, 0.3))
    before = dict(cluster.counts)
    cluster.restart()
    await cluster.run(SETTLED_S - PERIOD_S, steady(60, 0.3))
    assert cluster.budget.wanted() == {}
    await cluster.run(300, steady(60, 0.3))
    assert cluster.counts == before


@pytest.mark.parametrize(("seconds", "periods"), [(1.0, 2), (100.0, 11)])
async def test_forecasts_look_ahead_by_what_starts_took(
    monkeypatch: pytest.MonkeyPatch, seconds: float, periods: int
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Forecast, "look", lambda _, ahead: looked.append(ahead))
    cluster = Cluster(serving())
    cluster.now = 60.0
    for _ in range(20):
        cluster.starting.hear("texts", "a", Step(STARTING, 0.0))
        cluster.now += seconds / 20
    cluster.starting.hear("texts", "a", None)
    await cluster.run(120, steady(30, CHAT_EACH))
    assert set(looked[-2:]) == {periods, 4}, "chat's is assumed"
    facts = cluster.budget.facts("texts")["budget"]
    assert (facts["start_s"], facts["start_measured"]) == (seconds, True)
    assert not cluster.budget.facts("chat")["budget"]["start_measured"]


async def test_what_is_not_measured_keeps_its_replicas() -> None:
    cluster = Cluster(serving())
    cluster.counts["texts"] = 2
    await cluster.run(300, lambda _: {"texts": 0, "chat": 3 * CHAT_EACH})
    assert "chat" in cluster.budget.wanted()
    quiet = Cluster(serving())
    for _ in range(20):
        quiet.now += PERIOD_S
        await quiet.budget.step()
    assert quiet.budget.wanted() == {}
    assert quiet.budget.facts("chat")["wanted_replicas"] == 1
    assert "budget" not in quiet.budget.facts("chat")


async def test_where_the_least_do_not_fit_nothing_changes_and_stats_say_so() -> None:
    cluster = Cluster(serving())
    await cluster.run(300, steady(60, 0.3))
    before = dict(cluster.counts)
    cluster._cpus = 1.0
    cluster.now += PERIOD_S
    await cluster.budget.step()
    assert cluster.budget.wanted() == before
    assert "lower min replicas" in reasons(cluster, "texts")


async def test_a_service_gets_the_gpus_that_others_leave_and_no_cpus_instead() -> None:
    cluster = Cluster(serving(images={"replicas": 2, "gpus": 0.5}, gpus=1))
    cluster.gpus = 3
    await cluster.run(300, steady(60, 0.3))
    assert cluster.counts["texts"] == 2
    cluster.gpus = 2
    await cluster.run(300, steady(60, 0.3))
    assert cluster.counts["texts"] == 1
    cluster.gpus = 1
    await cluster.run(300, steady(60, 0.3))
    assert cluster.counts["texts"] == 1
    assert "nothing changes" in reasons(cluster, "texts")


async def test_more_gateways_leave_less_for_services() -> None:
    cluster = Cluster(serving(cpus=7.0, gateway=1.0))
    await cluster.run(600, steady(60, 3.5 * CHAT_EACH))
    assert sum(cluster.counts.values()) == 6
    cluster.gateways = 3
    await cluster.run(60, steady(60, 3.5 * CHAT_EACH))
    assert sum(cluster.counts.values()) == 4


async def test_a_level_wakes_that_a_cascade_could_not_ask_and_stays_awake_as_long_as_that_goes_on() -> None:
    cluster = Cluster(serving(replicas={"min": 0, "max": 5}))
    cluster.budget.hear("cascade", News(asked=Counter({"texts": 1, "fixed": 1})))
    assert cluster.budget.wanted() == {"texts": 1}
    cluster.counts["texts"] = 1
    for _ in range(5):
        cluster.budget.hear("cascade", News(asked=Counter({"texts": 1})))
        await cluster.run(SLEEPS_AFTER_S - 2 * PERIOD_S, steady(0, 3.5 * CHAT_EACH))
        assert cluster.counts["texts"] == 1
    await cluster.run(SLEEPS_AFTER_S, steady(0, 3.5 * CHAT_EACH))
    assert cluster.counts["texts"] == 0


def test_what_a_start_still_takes() -> None:
    now = [0.0]
    starting = StartingReplicas(lambda: now[0])
    assert starting.within_s("texts") == 30.0, "as is assumed"
    now[0] = 100.0
    starting.hear("texts", "a", Step(STARTING, 0.0))
    now[0] = 108.0
    starting.hear("texts", "a", None)
    assert starting.within_s("texts") == 8.0
    starting.hear("texts", "b", Step(STARTING, 0.0))
    now[0] = 111.0
    assert starting.within_s("texts") == 5.0
    now[0] = 119.0
    starting.hear("texts", "b", Step(STARTING, 0.5))
    assert starting.within_s("texts") == 1.0, "any moment"


async def test_a_surge_is_not_waited_out() -> None:
    cluster = Cluster(serving())
    await cluster.run(600, steady(60, 0.3))
    assert (cluster.counts["texts"] >= 4, cluster.counts["chat"]) == (True, 1)
    second = int(cluster.now)

    async def look(chats: int) -> dict[str, int]:
        seconds = Counter({second: chats, second + 1: chats, second + 2: 0})
        cluster.budget.hear("chat", News(arrived=Counter({PROMPT: 2 * chats}), seconds=seconds))
        await cluster.budget.look()
        return dict(cluster.budget.wanted())

    assert await look(1) == cluster.counts, "as many as chance makes"
    wanted = await look(int(3.5 * CHAT_EACH) + 5)
    assert wanted["chat"] > 1
    assert wanted["texts"] < cluster.counts["texts"]
    assert "took" in reasons(cluster, "chat")


async def test_what_was_asked_before_a_silence_is_no_surge_in_it() -> None:
    cluster = Cluster(serving())
    await cluster.run(600, steady(60, 0.3))
    before = cluster.counts["texts"]
    second = int(cluster.now)
    cluster.budget.hear("texts", News(seconds=Counter({second - back: 60 for back in range(10)})))
    for _ in range(30):
        await cluster.run(PERIOD_S, steady(0, 0.3))
        assert cluster.counts["texts"] <= before
        before = cluster.counts["texts"]
        cluster.now += LOOK_S
        await cluster.budget.look()
        assert cluster.budget.wanted()["texts"] == before
    assert before == 1


async def test_bursts_get_replicas_that_an_even_load_does_not() -> None:
    counts = {}
    for name, each_second in (("even", (30, 30)), ("bursts", (60, 0))):
        cluster = Cluster(serving())
        for _ in range(90):
            seconds = Counter({int(cluster.now) + at: each_second[at % 2] for at in range(int(PERIOD_S))})
            cluster.budget.hear("texts", News(seconds=seconds))
            await cluster.run(PERIOD_S, steady(30, 0.3))
        counts[name] = cluster.counts["texts"]
    assert counts["bursts"] > counts["even"]
