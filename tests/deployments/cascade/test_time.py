"""A cascade over real classifiers and tables of replicas: what is answered in which time, which never varies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from support import virtual_loop
from support.doubles import report
from support.scripted_cascade import LABELS, TOKENIZER, CascadeRecorder, candidate
from support.scripted_replicas import Act, slow
from support.text_service import TextService

from pliant.config.cascade import CascadeConfig
from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.encoder.messages import Answer
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Prediction
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.policies.cascade.candidates import Candidate

pytestmark = pytest.mark.virtual_time

SMALL_S, LARGE_S = 0.005, 0.040
HANGS = Act(stops=True)
SURE = Answer(np.array([9, 0, 0], np.float32).tobytes(), 64, 64)

T = TypeVar("T")


def level(folder: Path, name: str, service_s: float, act: Act | None) -> TextService:
    """A service on one replica, which says that it takes `service_s` a text, and does, unless it is to `act` so."""
    script = [act or slow(service_s)]
    return TextService(folder, {name: script}, name, lambda _query: SURE, LABELS, held=64, service_s=service_s)


class House:
    """Two classifiers, and a cascade of those of them that are `levels`."""

    def __init__(
        self,
        folder: Path,
        *levels: str,
        goes_on: bool = True,
        fallback: Candidate | None = None,
        small: Act | None = None,
        large: Act | None = None,
        degrade: bool = False,
    ) -> None:
        TOKENIZER.save(str(folder / "tokenizer.json"))
        self.small, self.large = level(folder, "small", SMALL_S, small), level(folder, "large", LARGE_S, large)
        chosen = candidate(*levels, cutoff=1.0 if goes_on else 0.0, slope=10.0 if goes_on else 1e6)
        latency_s = tuple({"small": SMALL_S, "large": LARGE_S}[level] for level in levels)
        entry = Chosen("c", f"serves {chosen}", Choice(chosen, None, latency_s, 1000, fallback))
        config = CascadeConfig(
            kind="cascade", levels=("small", "large"), data="d", accuracy_loss=0.01, degrade=degrade, check=0
        )
        self.recorder = CascadeRecorder()
        classifiers = {"small": self.small.classifier, "large": self.large.classifier}
        self.cascade = CascadeClassifier("c", config, classifiers, lambda: entry, self.recorder)

    async def ask(self, slo_ms: float = 1000, text: str = "yes t1") -> Prediction:
        [prediction] = await self.cascade.classify([text], ClassifyParameters(slo_ms=slo_ms))
        return prediction

    async def outcome(self, slo_ms: float, text: str = "yes t1") -> Outcome:
        """How it ended for the client, which is how it was counted."""
        try:
            answer = await self.ask(slo_ms, text)
        except RequestError as error:
            outcome = error.outcome
        else:
            outcome = Outcome.DEGRADED if answer.details and answer.details.degraded else Outcome.OK
        assert self.recorder.ends == [outcome]
        return outcome


async def timed(answer: Awaitable[T]) -> tuple[float, T]:
    """The seconds that it took, and what it is."""
    started = time.monotonic()
    found = await answer
    return time.monotonic() - started, found


@pytest.mark.real_time
@pytest.mark.parametrize("degrade", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_more_time_never_turns_an_answer_into_a_refusal(tmp_path: Path, goes_on: bool, degrade: bool) -> None:
    async def outcome(slo_ms: float) -> Outcome:
        return await House(tmp_path, "small", "large", goes_on=goes_on, degrade=degrade).outcome(slo_ms)

    found = [virtual_loop.run(outcome(slo_ms)) for slo_ms in range(1, 101)]
    answers = [outcome in (Outcome.OK, Outcome.DEGRADED) for outcome in found]
    first = answers.index(True) + 1
    assert answers == [False] * (first - 1) + [True] * (101 - first)
    assert set(found[: first - 1]) <= {Outcome.SHED, Outcome.TOO_LATE}
    assert first == (45 if goes_on and not degrade else 5)


async def test_time_that_earlier_levels_took_is_not_the_fault_of_the_later_one(tmp_path: Path) -> None:
    house = House(tmp_path, "small", "large", small=slow(0.2))
    with pytest.raises(RequestError) as error:
        await house.ask(230)
    assert (error.value.outcome, error.value.fault) == (Outcome.TOO_LATE, Fault.SHORT_SLO)
    assert error.value.reason == (
        "small left 30.0 ms of slo_ms 230 for large, which takes 40.0 ms on average; c needs it for this text: retry "
        "later, or raise slo_ms"
    )
    lenient = House(tmp_path, "small", "large", degrade=True, small=slow(0.2))
    assert (await lenient.ask(230)).warning == "degraded: answered without large, which did not answer in time"
    assert ("degraded", "large", "late") in lenient.recorder.events
    assert lenient.recorder.ends == [Outcome.DEGRADED]


async def test_a_replica_that_stalls_alone_gives_no_time(tmp_path: Path) -> None:
    """Late is better than lost only once something was lost, or another replica was asked."""
    house = House(tmp_path, "small", "large", small=slow(0.3))
    assert await house.outcome(330) == Outcome.TOO_LATE
    assert not house.large.queries


@pytest.mark.parametrize("degrade", [False, True])
async def test_a_text_that_waits_for_a_replica_on_the_move_has_its_time_once_more(
    tmp_path: Path, degrade: bool
) -> None:
    house = House(tmp_path, "small", "large", degrade=degrade)
    house.small.table.stop_routing({"small"})
    answer = asyncio.create_task(house.outcome(1000))
    await asyncio.sleep(5)
    house.small.table.stop_routing(())
    assert await answer == Outcome.OK
    [query] = house.large.queries
    assert query.budget_s is not None
    assert 0.9 < query.budget_s < 1


@pytest.mark.parametrize("slo_ms", [12, 60, 1000])
async def test_an_answer_without_a_level_that_hangs_is_in_time(tmp_path: Path, slo_ms: float) -> None:
    house = House(tmp_path, "small", "large", degrade=True, large=HANGS)
    seconds, prediction = await timed(house.ask(slo_ms))
    assert prediction.details
    assert prediction.details.degraded
    assert seconds < slo_ms / 1e3
    if slo_ms > 60:
        assert seconds == pytest.approx(0.95 * slo_ms / 1e3)
        assert house.large.recorder.ends == [Outcome.UNAVAILABLE]  # it is not idle


async def test_what_holds_no_runtime_for_the_text_is_not_waited_for(tmp_path: Path) -> None:
    house = House(tmp_path, "small", "large", degrade=True)
    house.large.table.sync({"large": report(2, version=2)})
    assert not house.large.classifier.down
    seconds, prediction = await timed(house.ask(5000, "w1 w2 yes t1"))
    assert prediction.warning == "degraded: answered without large, which is down"
    assert seconds == pytest.approx(SMALL_S)
    assert house.large.recorder.ends == [Outcome.UNAVAILABLE]
    strict = House(tmp_path, "small", "large")
    strict.large.table.sync({"large": report(2, version=2)})
    seconds, outcome = await timed(strict.outcome(5000, "w1 w2 yes t1"))
    assert outcome == Outcome.UNAVAILABLE
    assert seconds == pytest.approx(30 + SMALL_S)


async def test_one_level_alone_that_is_down_hangs_or_is_busy_has_a_stand_in(tmp_path: Path) -> None:
    def house(large: Act | None = None) -> House:
        fallback = candidate("small", mean_latency_s=SMALL_S)
        return House(tmp_path, "large", degrade=True, fallback=fallback, large=large)

    down, hangs, busy = house(), house(HANGS), house()
    down.large.table.sync({})
    seconds, prediction = await timed(down.ask())
    assert prediction.details
    assert prediction.details.level == "small"
    assert down.cascade.ready
    assert seconds == pytest.approx(SMALL_S)
    seconds, prediction = await timed(hangs.ask())
    assert prediction.warning == "degraded: answered without large, which did not answer in time"
    assert 0.9 < seconds < 1
    assert hangs.large.recorder.ends == [Outcome.UNAVAILABLE]

    crowd = [f"yes t{number}" for number in range(60)]
    seconds, predictions = await timed(busy.cascade.classify(crowd, ClassifyParameters()))
    by_level = [prediction.details.level for prediction in predictions if prediction.details]
    assert 20 < by_level.count("large") < 30
    assert by_level.count("large") + by_level.count("small") == 60
    assert seconds <= 1
    assert {event[2] for event in busy.recorder.events if event[0] == "degraded"} == {"busy"}
    assert busy.recorder.ends.count(Outcome.DEGRADED) == by_level.count("small")
    assert busy.recorder.ends.count(Outcome.OK) == by_level.count("large")


async def test_a_level_whose_caller_left_was_not_idle(tmp_path: Path) -> None:
    house = House(tmp_path, "small", "large", large=HANGS)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(house.ask(), 0.2)
    assert house.large.recorder.ends == [Outcome.CANCELLED]
    assert house.recorder.ends == [Outcome.CANCELLED]
