"""A cascade over real classifiers and their call paths: what is answered in which time, in a time that never varies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support import virtual_loop
from support.doubles import report
from support.scripted_cascade import LABELS, TOKENIZER, candidate
from support.scripted_cascade import Recorder as CascadeRecorder
from support.scripted_replicas import slow
from support.text_service import TextService

from pliant.config.cascade import CascadeConfig
from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.messages import CascadeEntry
from pliant.deployments.encoder.endpoint import Prediction
from pliant.deployments.encoder.messages import Answer
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.policies.cascade.candidates import Candidate

SMALL_S, LARGE_S = 0.005, 0.040
ANSWER = Answer(np.array([9, 0, 0], np.float32).tobytes(), 64, 64)


class House:
    """Each level has one replica, which says that it takes SMALL_S or LARGE_S a text, and does, but for `takes_s`."""

    def __init__(
        self,
        folder: Path,
        *levels: str,
        goes_on: bool = True,
        fallback: Candidate | None = None,
        takes_s: Mapping[str, float] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        TOKENIZER.save(str(folder / "tokenizer.json"))
        seconds = {"small": SMALL_S, "large": LARGE_S}

        def level(name: str, service_s: float) -> TextService:
            script = [slow(takes_s.get(name, service_s))]
            options: Any = {"labels": LABELS, "held": 64, "service_s": service_s}
            return TextService(folder, {name: script}, name, lambda _query: ANSWER, **options)

        self.levels = {name: level(name, service_s) for name, service_s in seconds.items()}
        self.small, self.large = self.levels.values()
        chosen = candidate(*levels, cutoff=1.0 if goes_on else 0.0, slope=10.0 if goes_on else 1e6)
        latency_s = tuple(seconds[level] for level in levels)
        entry = CascadeEntry("c", f"serves {chosen}", Choice(chosen, None, latency_s, 1000, fallback))
        config = CascadeConfig(kind="cascade", levels=("small", "large"), data="d", accuracy_loss=0.01, **options)
        self.recorder = CascadeRecorder()
        classifiers = {name: level.classifier for name, level in self.levels.items()}
        self.cascade = CascadeClassifier("c", config, classifiers, lambda: entry, self.recorder)

    async def ask(self, slo_ms: float = 1000, text: str = "yes t1") -> Prediction:
        [prediction] = await self.cascade.classify([text], ClassifyParameters(slo_ms=slo_ms))
        return prediction

    async def outcome(self, slo_ms: float, text: str = "yes t1") -> Outcome:
        try:
            answer = await self.ask(slo_ms, text)
        except RequestError as error:
            return error.outcome
        return Outcome.DEGRADED if answer.details and answer.details.degraded else Outcome.OK


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a coroutine in virtual time; the seconds that it took, and what it returned."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> tuple[float, Any]:
        async def timed() -> tuple[float, Any]:
            loop = asyncio.get_running_loop()
            with monkeypatch.context() as patch:
                patch.setattr(time, "monotonic", loop.time)
                return loop.time(), await coroutine

        with asyncio.Runner(loop_factory=virtual_loop.VirtualLoop) as runner:
            started, found = runner.run(timed())
            return runner.get_loop().time() - started, found

    return run


@pytest.mark.parametrize("degrade", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_more_time_never_turns_an_answer_into_a_refusal(
    tmp_path: Path, virtual: Any, goes_on: bool, degrade: bool
) -> None:
    found = []
    for slo_ms in range(1, 101):
        house = House(tmp_path, "small", "large", goes_on=goes_on, degrade=degrade)
        found.append(virtual(house.outcome(slo_ms))[1])
    answers = [outcome in (Outcome.OK, Outcome.DEGRADED) for outcome in found]
    first = answers.index(True) + 1
    assert answers == [False] * (first - 1) + [True] * (101 - first)
    assert set(found[: first - 1]) <= {Outcome.SHED, Outcome.TOO_LATE}
    assert first == (45 if goes_on and not degrade else 5)


def test_time_that_earlier_levels_took_is_not_the_fault_of_the_later_one(tmp_path: Path, virtual: Any) -> None:
    house = House(tmp_path, "small", "large", takes_s={"small": 0.2})
    with pytest.raises(RequestError) as error:
        virtual(house.ask(230))
    assert error.value.outcome == Outcome.TOO_LATE
    assert error.value.reason == (
        "small left 30.0 ms of slo_ms 230 for large, which takes 40.0 ms on average; c needs it for this text: retry "
        "later, or raise slo_ms"
    )
    lenient = House(tmp_path, "small", "large", degrade=True, takes_s={"small": 0.2})
    assert virtual(lenient.ask(230))[1].warning == "degraded: answered without large, which did not answer in time"
    assert ("degraded", "large", "late") in lenient.recorder.events


@pytest.mark.parametrize("slo_ms", [12, 60, 1000])
def test_an_answer_without_a_level_that_hangs_is_in_time(tmp_path: Path, virtual: Any, slo_ms: float) -> None:
    house = House(tmp_path, "small", "large", degrade=True, takes_s={"large": 1e6})
    seconds, prediction = virtual(house.ask(slo_ms))
    assert prediction.details.degraded
    assert seconds < slo_ms / 1e3
    if slo_ms > 60:
        assert seconds == pytest.approx(0.95 * slo_ms / 1e3)
        assert house.large.recorder.ends == [Outcome.UNAVAILABLE]  # it is not idle


def test_what_holds_no_runtime_for_the_text_is_not_waited_for(tmp_path: Path, virtual: Any) -> None:
    house = House(tmp_path, "small", "large", degrade=True)
    house.large.table.sync({"large": report(2, version=2)})
    assert not house.large.classifier.down
    seconds, prediction = virtual(house.ask(5000, "w1 w2 yes t1"))
    assert prediction.warning == "degraded: answered without large, which is down"
    assert seconds == pytest.approx(SMALL_S)
    assert house.large.recorder.ends == [Outcome.UNAVAILABLE]
    strict = House(tmp_path, "small", "large")
    strict.large.table.sync({"large": report(2, version=2)})
    seconds, outcome = virtual(strict.outcome(5000, "w1 w2 yes t1"))
    assert outcome == Outcome.UNAVAILABLE
    assert 30 + SMALL_S <= seconds < 30.1 + SMALL_S


def test_one_level_alone_that_is_down_hangs_or_is_busy_has_a_stand_in(tmp_path: Path, virtual: Any) -> None:
    def house(large_s: float = LARGE_S) -> House:
        fallback = candidate("small", mean_latency_s=SMALL_S)
        return House(tmp_path, "large", degrade=True, fallback=fallback, takes_s={"large": large_s})

    down, hangs, busy = house(), house(1e6), house()
    down.large.table.sync({})
    seconds, prediction = virtual(down.ask())
    assert prediction.details.level == "small"
    assert down.cascade.ready
    assert seconds == pytest.approx(SMALL_S)
    seconds, prediction = virtual(hangs.ask())
    assert prediction.warning == "degraded: answered without large, which did not answer in time"
    assert 0.9 < seconds < 1
    assert hangs.large.recorder.ends == [Outcome.UNAVAILABLE]

    async def crowd() -> list[Prediction]:
        return await busy.cascade.classify([f"yes t{number}" for number in range(60)], ClassifyParameters())

    seconds, predictions = virtual(crowd())
    by_level = [prediction.details.level for prediction in predictions if prediction.details]
    assert 20 < by_level.count("large") < 30
    assert by_level.count("large") + by_level.count("small") == 60
    assert seconds <= 1
    assert {event[2] for event in busy.recorder.events if event[0] == "degraded"} == {"busy"}


def test_once_a_level_took_much_too_long_late_is_better_than_lost(tmp_path: Path, virtual: Any) -> None:
    house = House(tmp_path, "small", "large", takes_s={"small": 0.3})
    seconds, prediction = virtual(house.ask(310))
    assert prediction.details.level == "large"
    assert seconds == pytest.approx(0.3 + LARGE_S)
    assert house.large.queries[0].budget_s is None


def test_a_level_whose_caller_left_was_not_idle(tmp_path: Path, virtual: Any) -> None:
    house = House(tmp_path, "small", "large", takes_s={"large": 1e6})

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(house.ask(), 0.2)

    virtual(leave())
    assert house.large.recorder.ends == [Outcome.CANCELLED]
