"""The one call path, as properties of what a client sees, for answers that come whole and piece by piece."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_replicas import (
    ANSWER_S,
    ANSWERS,
    Act,
    CountingChooser,
    Service,
    nothing_left,
    refuses,
    report,
    slow,
)
from support.spans import collected
from support.virtual_loop import run

from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.errand import Errand
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.outcome import Outcome, RequestError, Retry, counted
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal

pytestmark = pytest.mark.virtual_time

Way = Literal["whole", "pieces"]
WAYS: tuple[Way, ...] = ("whole", "pieces")
both_ways = pytest.mark.parametrize("way", WAYS)

TEXT = list("abcdef")
TIMEOUT_S = 30.0
SILENCE_S = 10.0
NOTICED_S = 3.5
"""A replica that stopped, since a request waits for it."""


class Reading(Errand[tuple[int, bool], tuple[str, ...], Any]):
    """To be told TEXT."""

    numbers = itertools.count()

    def __init__(self, timeout_s: float = TIMEOUT_S, waits: bool = True, renews: Iterable[bool] = ()) -> None:
        self.subject = "the reader"
        self.timeout_s = timeout_s
        self.waits = waits
        self.told: list[str] = []
        self.lates: list[bool] = []
        self.times_waited = 0
        self.renew_s = 0.01
        self.too_late: RequestError | None = None
        self._number = next(self.numbers)
        self._renews = iter(renews)

    def want(self, late: bool) -> tuple[int, bool]:
        if self.too_late and not late:
            raise self.too_late
        return self._number, late

    def query(self, late: bool) -> tuple[str, ...]:
        self.lates.append(late)
        return tuple(TEXT[len(self.told) :])

    def take(self, item: str) -> bool:
        self.told.append(item)
        return len(self.told) == len(TEXT)

    def waited(self) -> None:
        self.times_waited += 1

    async def renew(self, refusal: Refusal) -> bool:
        await asyncio.sleep(self.renew_s)
        return next(self._renews, False)


async def ask(service: Service, way: Way, errand: Reading | None = None) -> list[str]:
    errand = errand or Reading()
    with counted(service.recorder):
        if way == "whole":
            return list((await service.caller.answer(errand))[0])
        async with aclosing(service.caller.stream(errand)) as pieces:
            return [piece async for piece in pieces]


async def refused(service: Service, way: Way, errand: Reading | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await ask(service, way, errand)
    assert service.recorder.ends == [caught.value.outcome]
    return caught.value


def first(*scripts: list[Act], others: int = 1) -> Service:
    """Replicas that are preferred in this order, and others that answer."""
    named = {f"bad{index}": script for index, script in enumerate(scripts)}
    named |= {f"good{index}": [ANSWERS] for index in range(others)}
    return Service(named, CountingChooser(tuple(named)))


@dataclass(frozen=True)
class Failure:
    act: Act
    why: Retry
    """The label of the retry, however the answer comes."""
    within_s: float = 0.2


STALLS = Failure(Act(stops=True), "stalled", NOTICED_S)
FAILURES = {
    "killed": Failure(Act(dies=True), "lost"),
    "stopped": STALLS,
    "slow": Failure(slow(20.0), "stalled", SILENCE_S + 1),
    "raising in the engine": Failure(refuses("failed"), "lost"),
    "raising on the way": Failure(Act(error=ReplicaLostError("RuntimeError: no metadata")), "lost"),
    "busy": Failure(refuses("busy", retry_after_s=1.0), "busy"),
    "moved": Failure(refuses("moved", report=report(2)), "moved"),
    "unable": Failure(refuses("unable"), "moved"),
    "left": Failure(Act(error=ReplicaLeftError("it has left")), "moved"),
    "not deployed": Failure(Act(error=NotDeployedError()), "moved"),
    "killed amidst": Failure(Act(dies=True, pieces=2), "lost"),
    "stopped amidst": Failure(Act(stops=True, pieces=2), "stalled", NOTICED_S),
    "breaking down amidst": Failure(Act(refusal=Refusal("failed", "out of memory"), pieces=2), "lost"),
    "moved amidst": Failure(Act(refusal=Refusal("moved", "drained"), pieces=2), "moved"),
    "busy amidst": Failure(Act(refusal=Refusal("busy", "preempted"), pieces=2), "busy"),
}


@both_ways
@pytest.mark.parametrize("replicas", [1, 2], ids=["one fails", "two fail"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_nothing_is_lost_where_another_replica_lives(failure: Failure, replicas: int, way: Way) -> None:
    async with nothing_left(first(*[[failure.act, ANSWERS]] * replicas)) as service:
        began = time.monotonic()
        assert await ask(service, way) == TEXT
        assert time.monotonic() - began < replicas * failure.within_s
        assert service.recorder.ends == [Outcome.OK]
        assert service.recorder.retries == [failure.why] * replicas
        assert len(service.replicas.asked) == replicas + 1


@both_ways
@pytest.mark.parametrize("lives", [True, False], ids=["it lives on", "it dies"])
async def test_what_a_stopped_replica_has_is_answered_by_others_however_much_it_is(lives: bool, way: Way) -> None:
    async with nothing_left(Service({"bad": [ANSWERS], "good": [ANSWERS]})) as service:
        requests = [asyncio.create_task(ask(service, way)) for _ in range(60)]
        await asyncio.sleep(ANSWER_S / 2)
        service.replicas.stop("bad")
        if not lives:
            asyncio.get_running_loop().call_later(31.0, service.replicas.kill, "bad")
        assert await asyncio.gather(*requests) == [TEXT] * 60
        assert service.recorder.ends == [Outcome.OK] * 60


@both_ways
async def test_no_request_is_sent_to_a_stopped_replica_until_it_runs_again(way: Way) -> None:
    async with nothing_left(Service({"bad": [ANSWERS], "good": [ANSWERS]})) as service:
        service.replicas.stop("bad")
        requests = [asyncio.create_task(ask(service, way)) for _ in range(10)]
        await asyncio.sleep(NOTICED_S)
        assert [request.result() for request in requests] == [TEXT] * 10
        asked = Counter(service.replicas.asked)["bad"]
        for _ in range(100):
            assert await ask(service, way) == TEXT
        assert Counter(service.replicas.asked)["bad"] == asked
        service.replicas.resume("bad")
        await asyncio.sleep(40.0)  # it may have failed often enough to be ejected for a while
        await asyncio.gather(*(ask(service, way) for _ in range(2)))
        assert Counter(service.replicas.asked)["bad"] == asked + 1


@both_ways
async def test_a_replica_that_runs_is_left_alone_while_it_computes(way: Way) -> None:
    service = first([Act(8.0, pieces=None)])
    service.chooser.predicted_s = 8.0
    async with nothing_left(service):
        assert await ask(service, way) == TEXT
        assert service.replicas.asked == ["bad0"]
        assert 4 <= len(service.replicas.probed) <= 8, "once a second at most"


@both_ways
async def test_one_request_after_the_other_to_a_stopped_replica_is_answered_by_another(way: Way) -> None:
    """However seldom they come, and though few hedges are allowed."""
    service = first([Act(stops=True)])
    service.chooser.predicted_s = None
    async with nothing_left(service):
        for _ in range(10):
            assert await ask(service, way) == TEXT
            await asyncio.sleep(60.0)


@both_ways
async def test_a_request_that_breaks_every_replica_breaks_no_more_than_three(way: Way) -> None:
    async with nothing_left(first(*[[refuses("failed", "illegal address")]] * 5, others=0)) as service:
        error = await refused(service, way)
        assert error.outcome == Outcome.UNAVAILABLE
        assert "illegal address" in error.reason
        assert service.replicas.asked == ["bad0", "bad1", "bad2"]
        assert service.recorder.retries == ["lost", "lost"]


@both_ways
async def test_none_that_refused_is_asked_again(way: Way) -> None:
    busy = [refuses("busy", "full", retry_after_s=after_s) for after_s in (5.0, 3.0)]
    async with nothing_left(first([busy[0]], [busy[1]], others=0)) as service:
        error = await refused(service, way)
        assert (error.outcome, error.retry_after_s) == (Outcome.SHED, 3.0)
        assert service.replicas.asked == ["bad0", "bad1"]
        assert service.recorder.retries == ["busy"]


@both_ways
async def test_three_refuse_for_all(way: Way) -> None:
    async with nothing_left(first(*[[refuses("busy")]] * 3)) as service:
        assert (await refused(service, way)).outcome == Outcome.SHED
        assert service.replicas.asked == ["bad0", "bad1", "bad2"]
        assert service.recorder.retries == ["busy"] * 2


@both_ways
async def test_what_none_is_able_to_get_ends_as_they_say(way: Way) -> None:
    unable = refuses("unable", "no such adapter", outcome=Outcome.REJECTED, fault="model_not_found")
    async with nothing_left(first([unable], [unable], others=0)) as service:
        error = await refused(service, way)
        assert (error.outcome, error.reason, error.fault) == (Outcome.REJECTED, "no such adapter", "model_not_found")
        assert service.recorder.retries == ["moved"]


@both_ways
async def test_what_is_read_anew_may_be_asked_of_the_same_replica(way: Way) -> None:
    async with nothing_left(first([refuses("unable"), ANSWERS], others=0)) as service:
        assert await ask(service, way, Reading(renews=[True])) == TEXT
        assert service.replicas.asked == ["bad0", "bad0"]
        assert service.recorder.retries == ["moved"]
        assert time.monotonic() < 0.04 + len(TEXT) * ANSWER_S  # without a pause


@both_ways
async def test_nobody_waits_for_ever_for_what_is_read_anew(way: Way) -> None:
    errand = Reading(timeout_s=5.0)
    errand.renew_s = 1e6
    async with nothing_left(first([refuses("unable")])) as service:
        assert (await refused(service, way, errand)).outcome == Outcome.UNAVAILABLE
        assert time.monotonic() < 5.1


@both_ways
async def test_a_final_word_is_final(way: Way) -> None:
    final = refuses("final", "too long", outcome=Outcome.REJECTED, fault="context")
    async with nothing_left(first([final])) as service:
        error = await refused(service, way)
        assert (error.outcome, error.reason, error.fault) == (Outcome.REJECTED, "too long", "context")
        assert service.replicas.asked == ["bad0"]
        assert service.recorder.retries == []


@both_ways
async def test_the_report_of_a_refusal_counts_at_once(way: Way) -> None:
    async with nothing_left(first([refuses("moved", report=report(7, elsewhere=3.0))])) as service:
        await ask(service, way)
        assert service.table.reports()["bad0"]["version"] == 7
        assert service.chooser.may["bad0"] == 3.0


@both_ways
async def test_once_a_replica_failed_the_deadline_no_longer_counts(way: Way) -> None:
    errand = Reading()
    async with nothing_left(first([Act(1.0, dies=True)])) as service:
        loop = asyncio.get_running_loop()
        gone = RequestError(Outcome.TOO_LATE, "no time left")
        loop.call_later(0.5, setattr, errand, "too_late", gone)
        assert await ask(service, way, errand) == TEXT
        assert errand.lates[0] is False
        assert errand.lates[-1] is True


@both_ways
async def test_there_is_no_time_left_before_a_replica_is_asked(way: Way) -> None:
    errand = Reading()
    errand.too_late = RequestError(Outcome.TOO_LATE, "no time left")
    async with nothing_left(first()) as service:
        assert (await refused(service, way, errand)).outcome == Outcome.TOO_LATE
        assert service.replicas.asked == []


class Expiring(Reading):
    def query(self, late: bool) -> tuple[str, ...]:
        raise RequestError(Outcome.TOO_LATE, "no time left")


@both_ways
async def test_there_is_no_time_left_when_the_query_is_written(way: Way) -> None:
    async with nothing_left(first()) as service:
        assert (await refused(service, way, Expiring())).outcome == Outcome.TOO_LATE
        assert service.replicas.asked == []


# Without a replica


@both_ways
async def test_it_waits_for_a_replica(way: Way) -> None:
    errand = Reading()
    async with nothing_left(first()) as service:
        service.table.sync({})
        asyncio.get_running_loop().call_later(5.0, service.table.sync, {"good0": report()})
        assert await ask(service, way, errand) == TEXT
        assert 5.0 < time.monotonic() < 5.3
        assert errand.times_waited > 0
        assert service.recorder.retries == []


@both_ways
async def test_it_does_not_wait_for_a_replica_for_longer_than_it_may_stand_still(way: Way) -> None:
    async with nothing_left(first()) as service:
        service.table.sync({})
        error = await refused(service, way, Reading(timeout_s=7.0))
        assert (error.outcome, error.retry_after_s) == (Outcome.UNAVAILABLE, 1.0)
        assert "within 7 s" in error.reason
        assert 7.0 <= time.monotonic() < 7.2


@both_ways
@pytest.mark.parametrize("waits", [True, False])
async def test_without_replicas_it_hears_how_long_a_start_still_takes(way: Way, waits: bool) -> None:
    async with nothing_left(first()) as service:
        service.table.sync({})
        service.table.starts_within_s = 12.5
        error = await refused(service, way, Reading(timeout_s=2.0, waits=waits))
        assert (error.outcome, error.retry_after_s) == (Outcome.UNAVAILABLE, 12.5)


@both_ways
async def test_who_does_not_wait_hears_so_at_once(way: Way) -> None:
    async with nothing_left(first()) as service:
        service.table.sync({})
        assert (await refused(service, way, Reading(waits=False))).outcome == Outcome.UNAVAILABLE
        assert time.monotonic() < 0.01


@both_ways
async def test_it_does_not_wait_for_a_replica_that_is_there(way: Way) -> None:
    errand = Reading(waits=False)
    async with nothing_left(first()) as service:
        assert await ask(service, way, errand) == TEXT
        assert errand.times_waited == 0


@both_ways
@pytest.mark.parametrize("act", [Act(error=NotDeployedError()), Act(error=ReplicaLeftError())])
async def test_a_replica_that_cannot_be_reached_is_not_tried_without_a_pause(act: Act, way: Way) -> None:
    async with nothing_left(first([act], others=0)) as service:
        assert (await refused(service, way, Reading(timeout_s=2.0))).outcome == Outcome.UNAVAILABLE
        assert 2 < len(service.replicas.asked) < 50
        assert time.monotonic() < 2.2


@both_ways
async def test_the_only_replica_is_asked_again(way: Way) -> None:
    async with nothing_left(first([refuses("failed"), ANSWERS], others=0)) as service:
        assert await ask(service, way) == TEXT
        assert service.recorder.retries == ["lost"]


@both_ways
@pytest.mark.parametrize("end", ["suspect", "move"])
async def test_one_that_failed_it_is_not_asked_again_while_another_cannot_be_chosen_for_a_moment(
    end: str, way: Way
) -> None:
    async with nothing_left(first([refuses("failed")])) as service:
        loop = asyncio.get_running_loop()
        if end == "suspect":
            service.table.suspect("good0")
            loop.call_later(1.5, service.table.trust, "good0")
        else:
            service.table.stop_routing(["good0"])
            loop.call_later(1.5, service.table.stop_routing, [])
        assert await ask(service, way) == TEXT
        assert service.replicas.asked == ["bad0", "good0"]
        assert time.monotonic() < 1.6 + len(TEXT) * ANSWER_S


@both_ways
async def test_one_that_failed_it_is_asked_again_where_the_other_does_not_come_back(way: Way) -> None:
    async with nothing_left(first([refuses("failed"), ANSWERS])) as service:
        service.table.suspect("good0")
        assert await ask(service, way, Reading(timeout_s=1.0)) == TEXT
        assert service.replicas.asked == ["bad0", "bad0"]


@both_ways
async def test_one_that_is_ejected_is_asked_what_all_others_failed(way: Way) -> None:
    async with nothing_left(first([refuses("failed")])) as service:
        for _ in range(3):
            service.table.failed("good0")
        for _ in range(5):
            assert await ask(service, way) == TEXT
        assert time.monotonic() < 5 * (0.1 + len(TEXT) * ANSWER_S)


@both_ways
@pytest.mark.parametrize(("others", "within_s"), [(0, 0.2), (1, 4.2)])
async def test_what_one_replica_fails_again_and_again_ends_and_says_so(others: int, within_s: float, way: Way) -> None:
    async with nothing_left(first([refuses("failed", "illegal address")], others=others)) as service:
        if others:
            service.table.suspect("good0")
        error = await refused(service, way)
        told = "1 replica of the reader failed over this request, 3 times in all; the last: illegal address"
        assert (error.outcome, error.reason) == (Outcome.UNAVAILABLE, told)
        assert service.replicas.asked == ["bad0"] * 3
        assert within_s - 0.2 < time.monotonic() < within_s


@both_ways
async def test_nobody_answers_in_time(way: Way) -> None:
    async with nothing_left(first([Act(stops=True)], others=0)) as service:
        error = await refused(service, way, Reading(timeout_s=4.0))
        assert error.outcome == Outcome.UNAVAILABLE
        assert 4.0 <= time.monotonic() < 4.1


# Clients that leave

LEAVING = {
    "before it is sent": (0.0, ANSWERS),
    "while it waits for an answer": (ANSWER_S / 2, ANSWERS),
    "while its replica is stopped": (15.0, Act(stops=True)),
    "while two are asked": (0.4, slow(0.5)),
    "while it is streamed": (3.5 * ANSWER_S, ANSWERS),
    "while it is read anew": (0.005, refuses("unable")),
}


@both_ways
@pytest.mark.parametrize("turns", [1, 5], ids=["cancelled once", "cancelled every turn"])
@pytest.mark.parametrize(("after_s", "act"), LEAVING.values(), ids=LEAVING)
async def test_a_client_that_leaves_ends_its_request_everywhere(after_s: float, act: Act, turns: int, way: Way) -> None:
    if way == "whole" and after_s == 3.5 * ANSWER_S:
        act = slow(1.0)
    async with nothing_left(first([act], [act], others=0)) as service:
        request = asyncio.create_task(ask(service, way))
        await asyncio.sleep(after_s)
        for _ in range(turns):
            request.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await request
        assert service.recorder.ends == [Outcome.CANCELLED]


@pytest.mark.parametrize("turns", [1, 5], ids=["cancelled once", "cancelled every turn"])
@pytest.mark.parametrize("after_s", [5.0, SILENCE_S + 0.5], ids=["while it is asked", "while it is left"])
async def test_a_client_leaves_a_replica_whose_stream_takes_time_to_end(after_s: float, turns: int) -> None:
    ended = []

    async def lingering(parcel: Parcel[tuple[str, ...]]) -> AsyncGenerator[Any, None]:
        try:
            await asyncio.sleep(1e6)
            yield Alive()
        finally:
            await asyncio.sleep(1.0)
            ended.append(parcel.replica)

    service = first([])
    async with nothing_left(service):
        service.caller = Caller(service.table, service.recorder, streams=lingering)
        request = asyncio.create_task(ask(service, "pieces"))
        await asyncio.sleep(after_s)
        for _ in range(turns):
            request.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await request
        assert service.recorder.ends == [Outcome.CANCELLED]
        assert ended == ["bad0"]


async def test_a_client_leaves_when_a_reply_has_failed_that_nobody_looked_at() -> None:
    errand = Reading()
    errand.renew_s = 1.0
    async with nothing_left(first([Act(0.5, dies=True)], [refuses("unable")], others=0)) as service:
        request = asyncio.create_task(ask(service, "whole", errand))
        await asyncio.sleep(0.7)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


@both_ways
async def test_a_client_leaves_while_there_is_no_replica(way: Way) -> None:
    async with nothing_left(first()) as service:
        service.table.sync({})
        request = asyncio.create_task(ask(service, way))
        await asyncio.sleep(1.0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert service.recorder.ends == [Outcome.CANCELLED]


async def test_a_stream_that_is_closed_ends_in_the_replica() -> None:
    async with nothing_left(first()) as service:
        pieces = service.caller.stream(Reading())
        assert [await anext(pieces), await anext(pieces)] == ["a", "b"]
        assert service.replicas.working["good0"] == 1
        await pieces.aclose()
        assert service.replicas.working["good0"] == 0
        assert not service.chooser.open


# Hedges


async def test_the_first_answer_wins_and_the_other_replica_stops() -> None:
    async with nothing_left(first([slow(5.0)])) as service:
        assert await ask(service, "whole") == TEXT
        assert service.replicas.asked == ["bad0", "good0"]
        assert 0.25 <= time.monotonic() < 0.3
        await asyncio.sleep(0.01)
        assert service.replicas.cancelled == {"bad0": 1}


async def test_the_one_that_was_asked_first_may_still_answer_first() -> None:
    async with nothing_left(first([slow(0.3)], [slow(5.0)])) as service:
        assert await ask(service, "whole") == TEXT
        assert 0.3 <= time.monotonic() < 0.31
        await asyncio.sleep(0.01)
        assert service.replicas.cancelled == {"bad1": 1}


async def test_an_answer_counts_though_the_other_replica_fails_at_the_same_time() -> None:
    for act in (Act(0.25, dies=True), Act(0.25, refusal=Refusal("final", "no")), Act(0.25, error=ValueError("x"))):
        async with nothing_left(first([slow(0.5)], [act])) as service:
            assert await ask(service, "whole") == TEXT
            assert service.recorder.ends == [Outcome.OK]


@pytest.mark.parametrize("cause", ["busy", "failed", "moved", "unable"])
async def test_a_request_that_is_under_way_is_not_given_up_for_what_another_replica_says(cause: str) -> None:
    fails = [refuses(cause)]
    async with nothing_left(first(fails, fails, [slow(1.0)], fails, fails)) as service:
        assert await ask(service, "whole") == TEXT
        assert service.recorder.retries.count("stalled") >= 1


async def test_a_second_replica_is_not_asked_of_a_chooser_that_would_rather_not_answer() -> None:
    service = first([slow(1.0)])
    async with nothing_left(service):
        shed = RequestError(Outcome.SHED, "too much to do")
        asyncio.get_running_loop().call_later(0.1, setattr, service.chooser, "sheds", shed)
        assert await ask(service, "whole") == TEXT
        assert service.recorder.ends == [Outcome.OK]
        assert service.recorder.retries == []


async def test_a_stream_goes_on_where_it_is_if_the_chooser_would_rather_not_answer() -> None:
    service = first([slow(15.0)])
    async with nothing_left(service):
        shed = RequestError(Outcome.SHED, "too much to do")
        asyncio.get_running_loop().call_later(0.1, setattr, service.chooser, "sheds", shed)
        assert await ask(service, "pieces") == TEXT
        assert service.recorder.ends == [Outcome.OK]


@both_ways
async def test_a_refuser_is_not_asked_again_though_the_other_stalls(way: Way) -> None:
    async with nothing_left(first([refuses("busy"), ANSWERS], [slow(25.0)], others=0)) as service:
        assert await ask(service, way) == TEXT
        assert service.replicas.asked == ["bad0", "bad1"]
        assert service.recorder.retries == ["busy"]


async def test_one_that_works_on_it_is_not_asked_again_though_something_was_read_anew() -> None:
    unable = [refuses("unable"), ANSWERS]
    async with nothing_left(first([slow(25.0), ANSWERS], unable, others=0)) as service:
        assert await ask(service, "whole", Reading(renews=[True])) == TEXT
        assert service.replicas.asked == ["bad0", "bad1", "bad1"]


async def test_when_all_is_slow_few_are_asked_twice() -> None:
    """Every replica answers, if five times as late as predicted."""
    async with nothing_left(Service({f"r{index}": [slow(0.6)] for index in range(4)})) as service:
        service.chooser.predicted_s = 0.12
        requests = []
        for _ in range(400):
            requests.append(asyncio.create_task(ask(service, "whole")))
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*requests) == [TEXT] * 400
        assert 10 <= service.recorder.retries.count("stalled") <= 1 + 0.1 * 400
        assert set(service.recorder.retries) == {"stalled"}


async def test_as_soon_as_predicted_none_is_asked_twice() -> None:
    async with nothing_left(first([slow(2.0)])) as service:
        service.chooser.predicted_s = 1.0
        assert await ask(service, "whole") == TEXT
        assert service.replicas.asked == ["bad0"]


# Failures in a row


@both_ways
async def test_a_replica_that_breaks_down_over_and_over_is_left_alone_for_ever_longer(way: Way) -> None:
    async with nothing_left(first([refuses("failed")])) as service:
        times: list[float] = []
        while time.monotonic() < 200.0:
            asked = len(service.replicas.asked)
            assert await ask(service, way) == TEXT
            if service.replicas.asked[asked] == "bad0":
                times.append(time.monotonic())
            await asyncio.sleep(0.1)
        pauses = [later - before for before, later in itertools.pairwise(times)]
        assert all(pause < 0.5 for pause in pauses[:2])
        assert pauses[2:9] == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.5)
        assert set(service.recorder.ends) == {Outcome.OK}


@both_ways
async def test_a_replica_that_answers_again_counts_as_any_other(way: Way) -> None:
    script = [refuses("failed")] * 4 + [ANSWERS] + [refuses("failed")] * 2 + [ANSWERS]
    async with nothing_left(first(script)) as service:
        for _ in range(40):
            assert await ask(service, way) == TEXT
            await asyncio.sleep(0.2)
        assert service.recorder.retries == ["lost"] * 6
        assert service.table.replicas()["bad0"]["ejected"] is False


# Streams


async def test_progress_makes_up_for_failures() -> None:
    """An answer may meet one replica after another that is replaced, if each says a little."""
    async with nothing_left(first(*[[Act(dies=True, pieces=1)]] * 5)) as service:
        assert await ask(service, "pieces") == TEXT
        assert service.recorder.retries == ["lost"] * 5


async def test_two_replicas_may_fail_in_turn() -> None:
    async with nothing_left(first(*[[Act(refusal=Refusal("failed", "x"), pieces=1)]] * 2, others=0)) as service:
        assert await ask(service, "pieces") == TEXT


async def test_a_silent_replica_is_not_left_if_no_other_can_go_on() -> None:
    async with nothing_left(first([slow(25.0)], others=0)) as service:
        assert await ask(service, "pieces") == TEXT
        assert service.replicas.asked == ["bad0"]
        assert service.recorder.retries == []


async def test_a_silent_replica_is_left_once_another_can_go_on() -> None:
    service = first([Act(stops=True, pieces=2)])
    async with nothing_left(service):
        service.table.sync({"bad0": report()})
        asyncio.get_running_loop().call_later(12.0, service.table.sync, {"bad0": report(), "good0": report()})
        assert await ask(service, "pieces") == TEXT
        assert 12.0 < time.monotonic() < 12.0 + NOTICED_S
        assert service.recorder.retries == ["stalled"]


async def test_a_replica_that_goes_on_after_a_silent_one_may_fail_in_turn() -> None:
    dies = Act(dies=True, pieces=1)
    async with nothing_left(first([Act(stops=True)], [dies])) as service:
        assert await ask(service, "pieces") == TEXT
        assert service.recorder.retries == ["stalled", "lost"]
        assert service.replicas.asked == ["bad0", "bad1", "good0"]


async def test_one_that_failed_before_may_go_on_once_another_got_on() -> None:
    flaky = [Act(refusal=Refusal("failed", "once"), pieces=1), ANSWERS]
    async with nothing_left(first(flaky, [Act(stops=True, pieces=1)], others=0)) as service:
        assert await ask(service, "pieces") == TEXT
        assert service.replicas.asked == ["bad0", "bad1", "bad0"]


async def test_signs_of_life_keep_a_stream_where_it_is() -> None:
    async with nothing_left(first([Act(25.0, pieces=None, alive_s=2.0)])) as service:
        assert await ask(service, "pieces") == TEXT
        assert service.replicas.asked == ["bad0"]


async def test_signs_of_life_are_no_progress() -> None:
    async with nothing_left(first([Act(100.0, pieces=None, alive_s=2.0)])) as service:
        assert (await refused(service, "pieces")).outcome == Outcome.UNAVAILABLE
        assert time.monotonic() == pytest.approx(TIMEOUT_S, abs=0.1)


async def test_a_client_that_reads_slowly_is_no_standstill() -> None:
    async with nothing_left(first()) as service:
        told = []
        with counted(service.recorder):
            async with aclosing(service.caller.stream(Reading())) as pieces:
                async for piece in pieces:
                    told.append(piece)
                    await asyncio.sleep(2 * TIMEOUT_S)
        assert told == TEXT
        assert service.recorder.retries == []


async def test_a_stream_that_ends_too_early_goes_on_elsewhere() -> None:
    async def half(parcel: Parcel[tuple[str, ...]]) -> AsyncGenerator[Any, None]:
        for piece in parcel.queries[0][:4]:
            yield piece

    service = first()
    async with nothing_left(service):
        caller: Caller[Any, Any, Any] = Caller(service.table, service.recorder, streams=half)
        assert [piece async for piece in caller.stream(Reading())] == TEXT
        assert service.recorder.retries == ["lost"]


async def test_a_stream_whose_end_fails_is_left_all_the_same() -> None:
    async def stuck(parcel: Parcel[tuple[str, ...]]) -> AsyncGenerator[Any, None]:
        if parcel.replica == "bad0":
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                raise ReplicaLostError("it died meanwhile") from None
        for piece in parcel.queries[0]:
            yield Alive()
            yield piece

    service = first([])
    async with nothing_left(service):
        caller: Caller[Any, Any, Any] = Caller(service.table, service.recorder, streams=stuck)
        assert [piece async for piece in caller.stream(Reading())] == TEXT
        assert service.recorder.retries == ["stalled"]


# Whatever happens

seconds = st.sampled_from([0.0, 0.001, ANSWER_S, 0.25, 0.5, 1.0, 11.0, 40.0])
acts = st.one_of(
    st.just(ANSWERS),
    st.builds(slow, seconds),
    st.builds(
        Act,
        after_s=seconds,
        every_s=st.sampled_from([ANSWER_S, 11.0]),
        refusal=st.none()
        | st.builds(Refusal, st.sampled_from(["busy", "moved", "unable", "failed", "final"]), st.just("x")),
        error=st.none() | st.sampled_from([ReplicaLostError("lost"), ReplicaLeftError("left"), NotDeployedError()]),
        dies=st.booleans(),
        stops=st.booleans(),
        pieces=st.integers(0, 6),
        alive_s=st.none() | st.just(3.0),
    ),
)


@dataclass(frozen=True)
class Client:
    comes_s: float
    way: Way
    waits: bool
    patient_s: float
    turns: int
    """For how many turns of the loop it is cancelled when it leaves."""


clients = st.builds(
    Client,
    seconds,
    st.sampled_from(WAYS),
    st.booleans(),
    st.sampled_from([0.0, ANSWER_S, 0.25, 0.5, 10.0, 1e9]),
    st.integers(1, 3),
)
happenings = st.lists(
    st.tuples(seconds, st.sampled_from(["kill", "stop", "resume", "gone", "back", "moving"]), st.integers(0, 3)),
    max_size=6,
)


@settings(max_examples=300)
@given(
    scripts=st.lists(st.lists(acts, min_size=1, max_size=4), min_size=1, max_size=4),
    asking=st.lists(clients, min_size=1, max_size=6),
    happenings=happenings,
    predicted_s=st.sampled_from([None, 0.001, 0.3]),
)
def test_whatever_happens_each_request_ends_once_and_leaves_nothing(
    scripts: list[list[Act]],
    asking: list[Client],
    happenings: list[tuple[float, str, int]],
    predicted_s: float | None,
) -> None:
    async def main() -> None:
        names = [f"r{index}" for index in range(len(scripts))]
        service = Service(dict(zip(names, scripts, strict=True)), CountingChooser(predicted_s=predicted_s))

        def happen(what: str, index: int) -> None:
            name = names[index % len(names)]
            match what:
                case "kill":
                    service.replicas.kill(name)
                case "stop":
                    service.replicas.stop(name)
                case "resume":
                    service.replicas.resume(name)
                case "gone":
                    service.table.sync({other: report() for other in names if other != name})
                case "back":
                    service.table.sync({other: report() for other in names})
                case "moving":
                    service.table.stop_routing([name])

        async def be(client: Client) -> None:
            await asyncio.sleep(client.comes_s)
            errand = Reading(waits=client.waits, renews=[True, False, True])
            request = asyncio.create_task(ask(service, client.way, errand))
            began = time.monotonic()
            await asyncio.wait((request,), timeout=client.patient_s)
            for _ in range(0 if request.done() else client.turns):
                request.cancel()
                await asyncio.sleep(0)
            with suppress(RequestError, asyncio.CancelledError):
                assert await request == TEXT
            most_s = TIMEOUT_S + 1 if client.way == "whole" else (len(TEXT) + 1) * (TIMEOUT_S + 1)
            assert time.monotonic() - began < most_s

        async with nothing_left(service):
            loop = asyncio.get_running_loop()
            for after_s, what, index in happenings:
                loop.call_later(after_s, happen, what, index)
            await asyncio.gather(*map(be, asking))
            assert len(service.recorder.ends) == len(asking)
            assert Outcome.FAILED not in service.recorder.ends
            chosen = [number for _, (number, _) in service.chooser.chosen]
            assert len(service.recorder.retries) == len(chosen) - len(set(chosen))

    run(main())


@both_ways
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_a_trace_says_who_was_asked_and_why_again(failure: Failure, way: Way) -> None:
    with collected() as spans:
        async with nothing_left(first([failure.act, ANSWERS])) as service:
            assert await ask(service, way) == TEXT
        failed, answered = spans.attempts()
    refusal = failure.act.refusal
    expected = refusal.cause if refusal else "left" if failure.why == "stalled" else "lost"
    assert (failed["pliant.replica"], failed["pliant.outcome"]) == ("bad0", expected)
    assert "pliant.retry" not in failed
    assert answered == {
        "pliant.subject": "the reader",
        "pliant.replica": "good0",
        "pliant.retry": failure.why,
        "pliant.outcome": "answered",
    }


@both_ways
async def test_a_client_that_leaves_ends_its_spans(way: Way) -> None:
    with collected() as spans:
        async with nothing_left(first([slow(20.0)])) as service:
            request = asyncio.create_task(ask(service, way))
            await asyncio.sleep(0.1)
            request.cancel()
            with suppress(asyncio.CancelledError):
                await request
        assert [each["pliant.outcome"] for each in spans.attempts()] == ["left"]
        assert len(spans.named("choose")) == 1
