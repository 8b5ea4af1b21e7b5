"""The gateway's vision service against scripted replicas: what is answered, retried, refused, and within which time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from support.scripted_vision import INFO, Replicas, Reply, Silent, TaskPlanner, brightness, service, task
from support.waiting import HANGS_AFTER_S

from pliant.deployments.http.parameters import VisionParameters
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.vision.messages import Answer, RegisteredTask
from pliant.formats.vision_task import own_task

pytestmark = pytest.mark.virtual_time

WHITE = np.full((INFO.height, INFO.width, 3), 255, dtype=np.uint8)
BLACK = np.zeros_like(WHITE)
LATE = Answer(np.array([1, 0], dtype="<f4").tobytes(), 2, "late", 1)
FULL = Refusal("busy", "the queue is full", 0.5, Outcome.SHED)
FAILED = Refusal("failed", "the computation broke down: OSError")
UNLOADED = Refusal("unable", "task parity: is broken", 0.1)


async def refused(call: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        await call
    return error.value


async def test_images_are_answered_with_the_labels_of_their_task() -> None:
    vision, replicas, _ = service(None, TaskPlanner(task(), task("large", ("small", "big", "huge"))))
    [white, black] = await vision.classify([WHITE, BLACK], VisionParameters(task="parity"))
    assert (white.labels, black.labels) == (["even", "odd"], ["odd", "even"])
    assert sum(white.scores) == pytest.approx(1)
    assert (white.gamma, white.fate) == (-4, "in_time")
    [best] = await vision.classify([BLACK], VisionParameters(task="large", top_k=1, function_to_apply="none"))
    assert (best.labels, best.scores) == (["big"], [1.0])
    assert replicas.recorder.events == [("answered", True)] * 3
    assert replicas.recorder.ends == [Outcome.OK] * 3
    assert replicas.recorder.arrivals == 3
    assert replicas.asked == ["a", "b", "c"]
    assert all(report["outstanding"] == 0 for report in replicas.table.replicas().values())


async def test_images_beyond_the_number_of_replicas_travel_together() -> None:
    vision, replicas, _ = service(Replicas(names="ab"))
    images = [WHITE, BLACK, BLACK, WHITE, BLACK]
    found = await vision.classify(images, VisionParameters())
    assert [each.labels[0] for each in found] == ["even", "odd", "odd", "even", "odd"]
    assert sorted(replicas.asked) == ["a"] * 3 + ["b"] * 2


@pytest.mark.parametrize(
    ("parameters", "options", "budget_s", "utility"),
    [
        ({}, {}, 50, 1.0),
        ({}, {"slo_ms": 500_000, "utility": 0.2}, 500, 0.2),
        ({"slo_ms": 3_000_000.0, "utility": 0.7}, {"slo_ms": 500_000, "utility": 0.2}, 3_000, 0.7),
    ],
)
async def test_the_request_counts_more_than_the_service_and_the_service_more_than_the_task(
    parameters: dict[str, Any], options: dict[str, Any], budget_s: float, utility: float
) -> None:
    vision, replicas, _ = service(None, TaskPlanner(task()._replace(slo_ms=50_000.0)), **options)
    await vision.classify([WHITE], VisionParameters(**parameters))
    [query] = replicas.queries
    assert budget_s / 2 < query.budget_s < budget_s
    assert query.utility == utility


async def test_a_late_answer_is_one() -> None:
    vision, replicas, _ = service(Replicas(LATE))
    [prediction] = await vision.classify([WHITE], VisionParameters())
    assert (prediction.fate, prediction.gamma) == ("late", 2)
    assert replicas.recorder.events == [("answered", False)]
    assert replicas.recorder.ends == [Outcome.OK]


@pytest.mark.parametrize(("outcome", "fault"), [(Outcome.SHED, Fault.EVICTED), (Outcome.TOO_LATE, None)])
async def test_refusals_are_told_at_once(outcome: Outcome, fault: Fault | None) -> None:
    vision, replicas, _ = service(Replicas(Refusal("final", "so it is", 0.5, outcome, fault)))
    error = await refused(vision.classify([WHITE], VisionParameters()))
    assert (error.outcome, error.fault, error.reason) == (outcome, fault, "digits: so it is")
    assert error.retry_after_s == 0.5
    assert len(replicas.asked) == 1
    assert replicas.recorder.ends == [outcome]
    assert not replicas.recorder.events


async def test_where_one_queue_is_full_another_may_have_room() -> None:
    vision, replicas, _ = service(Replicas(FULL, brightness))
    [prediction] = await vision.classify([WHITE], VisionParameters())
    assert prediction.labels[0] == "even"
    assert replicas.recorder.retries == ["busy"]
    assert replicas.recorder.events == [("answered", True)]
    assert len(set(replicas.asked)) == 2


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_an_image_for_which_all_are_full_is_shed(count: int) -> None:
    vision, replicas, _ = service(Replicas(FULL, names="abcde"[:count]))
    error = await refused(vision.classify([WHITE], VisionParameters()))
    assert (error.outcome, error.fault, error.retry_after_s) == (Outcome.SHED, None, 0.5)
    assert error.reason == "digits is too busy: the queue is full; retry later"
    assert len(set(replicas.asked)) == len(replicas.asked) == min(count, 3)
    assert replicas.recorder.ends == [Outcome.SHED]


@pytest.mark.parametrize(
    ("trouble", "event"),
    [
        (FAILED, "lost"),
        (UNLOADED, "moved"),
        (ReplicaLostError(), "lost"),
        (ReplicaLeftError(), "moved"),
        (NotDeployedError(), "moved"),
    ],
)
async def test_another_replica_is_asked_when_one_fails(trouble: Reply, event: str) -> None:
    vision, replicas, _ = service(Replicas(trouble, trouble, brightness))
    [prediction] = await vision.classify([WHITE], VisionParameters(slo_ms=60_000.0))
    assert prediction.labels[0] == "even"
    assert replicas.recorder.retries[:2] == [event] * 2
    assert len(set(replicas.asked)) == 3


async def test_an_image_that_was_lost_is_answered_late_rather_than_not() -> None:
    """The replica dies when the deadline is over: another has as long as the first had."""

    class Dying(Replicas):
        async def one(self, parcel: Any) -> Any:
            if self.asked:
                return await super().one(parcel)
            self.asked.append(parcel.replica)
            await asyncio.sleep(0.12)
            raise ReplicaLostError

    vision, replicas, _ = service(Dying(brightness))
    [prediction] = await vision.classify([WHITE], VisionParameters(slo_ms=100.0))
    assert (prediction.labels[0], prediction.fate) == ("even", "late")
    assert replicas.queries[0].budget_s == pytest.approx(0.1, abs=0.005)
    assert replicas.recorder.retries == ["lost"]
    assert replicas.recorder.events == [("answered", False)]


async def test_an_image_that_breaks_every_replica_is_given_up() -> None:
    vision, replicas, _ = service(Replicas(FAILED, names="abcde"))
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)))
    told = "3 replicas of digits failed over this request; the last: the computation broke down: OSError"
    assert (error.outcome, error.reason) == (Outcome.UNAVAILABLE, told)
    assert len(set(replicas.asked)) == len(replicas.asked) == 3
    assert {replicas.chosen() for _ in range(5)} == set("abcde"), "all are free again"


@pytest.mark.parametrize("count", [2, 5])
async def test_a_task_that_no_replica_can_load_is_given_up(count: int) -> None:
    vision, replicas, _ = service(Replicas(UNLOADED, names="abcde"[:count]))
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)))
    assert (error.outcome, error.reason, error.retry_after_s) == (
        Outcome.UNAVAILABLE,
        "digits: task parity: is broken",
        0.1,
    )
    assert len(replicas.asked) == min(count, 3)
    assert replicas.recorder.ends == [Outcome.UNAVAILABLE]


async def test_a_task_that_was_replaced_is_asked_for_anew() -> None:
    planner = TaskPlanner(task())
    newer = task(labels=("odd", "even"))
    newer = newer._replace(task=newer.task._replace(revision="2"))

    def replaced(_: Any) -> Refusal:
        planner.catalog.put({"digits/parity": newer})
        return UNLOADED

    vision, replicas, _ = service(Replicas(replaced, brightness, names="a"), planner)
    [prediction] = await vision.classify([WHITE], VisionParameters(slo_ms=60_000.0))
    assert (prediction.labels[0], replicas.queries[-1].task) == ("odd", newer.task)
    planner.catalog.put({"digits/parity": None})
    replicas.replies = [UNLOADED]
    assert (await refused(vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)))).fault == Fault.NOT_FOUND


async def test_a_task_that_replicas_only_try_cannot_be_named() -> None:
    planner = TaskPlanner(task(), task("large")._replace(coming=True))
    vision, *_ = service(planner=planner)
    await vision.classify([WHITE], VisionParameters())
    assert [entry.task.name for entry in vision.tasks()] == ["parity"]
    assert (await refused(vision.classify([WHITE], VisionParameters(task="large")))).fault == Fault.NOT_FOUND


async def test_what_a_replica_raises_is_its_failure() -> None:
    vision, replicas, _ = service(Replicas(ValueError("what"), brightness))
    assert (await vision.classify([WHITE], VisionParameters()))[0].labels[0] == "even"
    assert replicas.recorder.retries == ["lost"]
    assert replicas.recorder.events == [("answered", True)]


async def test_what_nobody_expects_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    vision, replicas, _ = service()

    def broken(*_: object) -> Any:
        raise ValueError("what")

    monkeypatch.setattr(replicas.table, "choose", broken)
    with pytest.raises(ValueError, match="what"):
        await vision.classify([WHITE], VisionParameters())
    assert replicas.recorder.ends == [Outcome.FAILED]


async def test_answers_have_so_many_labels_only() -> None:
    vision, *_ = service(planner=TaskPlanner(task(labels=tuple(map(str, range(30_000))))))
    error = await refused(vision.classify([WHITE] * 4, VisionParameters()))
    assert error.outcome == Outcome.REJECTED
    assert error.reason.endswith("; send at most 16384, or fewer images")
    assert len(await vision.classify([WHITE] * 4, VisionParameters(top_k=5))) == 4


async def test_it_is_ready_when_its_tasks_are_known() -> None:
    vision, _, follower = service()
    assert not vision.ready
    await follower.catch_up()
    assert vision.ready


async def test_without_replicas_requests_wait_for_them() -> None:
    vision, replicas, _ = service(Replicas(names=()))
    assert not vision.ready
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=80.0)))
    assert (error.outcome, error.reason) == (Outcome.UNAVAILABLE, "no replica of digits answered within 30 s")
    assert error.retry_after_s == 1
    waiting = asyncio.create_task(vision.classify([WHITE], VisionParameters(slo_ms=80.0)))
    await asyncio.sleep(10)
    replicas.run("a")
    assert vision.ready
    assert (await waiting)[0].labels[0] == "even"
    [query] = replicas.queries
    assert query.budget_s == pytest.approx(0.08, abs=0.005), "as if it had come just now"


async def test_one_bad_image_fails_the_request_and_frees_the_replicas() -> None:
    vision, replicas, _ = service()
    error = await refused(vision.classify([WHITE, b"no image"], VisionParameters()))
    assert error.fault == Fault.MEDIA_TYPE
    assert Outcome.REJECTED in replicas.recorder.ends


@pytest.mark.real_time
async def test_an_image_that_cannot_be_read_in_time_is_refused_then(monkeypatch: pytest.MonkeyPatch) -> None:
    vision, *_ = service()
    reading = threading.Event()
    monkeypatch.setattr(vision.reader, "fit", lambda _: reading.wait(HANGS_AFTER_S))
    try:
        error = await refused(vision.classify([WHITE[:4]], VisionParameters(slo_ms=50.0)))
        assert await vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)), "this needs no thread"
    finally:
        reading.set()
    assert (error.outcome, error.reason[:45]) == (Outcome.TOO_LATE, "digits could not read the image in time: 1 ar")
    assert error.retry_after_s == 1


@pytest.mark.real_time
async def test_large_images_do_not_hold_up_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    vision, *_ = service()
    reading = threading.Event()
    monkeypatch.setattr(vision.reader, "decode_quick", lambda file: WHITE if file == b"small" else None)
    monkeypatch.setattr(vision.reader, "decode", lambda _: WHITE if reading.wait(HANGS_AFTER_S) else None)
    large = [asyncio.create_task(vision.classify([b"large"], VisionParameters(slo_ms=60_000.0))) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert await vision.classify([b"small"], VisionParameters(slo_ms=60_000.0))
    reading.set()
    assert all(await asyncio.gather(*large))


async def test_a_client_that_leaves_frees_its_replica() -> None:
    vision, replicas, _ = service(Silent())
    call = asyncio.create_task(vision.classify([WHITE, BLACK], VisionParameters(slo_ms=60_000.0)))
    await asyncio.sleep(0.05)
    assert [each["outstanding"] for each in replicas.table.replicas().values()] == [1, 1, 0]
    call.cancel()
    await asyncio.wait([call])
    assert [each["outstanding"] for each in replicas.table.replicas().values()] == [0, 0, 0]
    assert replicas.recorder.ends == [Outcome.CANCELLED] * 2


async def test_a_service_that_hangs_ends_in_time() -> None:
    vision, replicas, _ = service(Silent(), timeout_s=0.05)
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=1000.0)))
    assert (error.outcome, error.reason) == (Outcome.UNAVAILABLE, "no replica of digits answered within 1 s")
    assert replicas.recorder.ends == [Outcome.UNAVAILABLE]


async def test_a_replica_that_is_silent_for_much_longer_than_it_had_is_not_waited_for() -> None:
    class OneIsSilent(Replicas):
        async def one(self, parcel: Any) -> Any:
            if parcel.replica == "a":
                await asyncio.Event().wait()
            return await super().one(parcel)

    vision, replicas, _ = service(OneIsSilent(names="ab"))
    [prediction] = await vision.classify([WHITE], VisionParameters(slo_ms=400.0))
    assert (prediction.labels[0], prediction.fate) == ("even", "late")
    assert 2 * 0.4 < asyncio.get_running_loop().time() < 3 * 0.4
    assert replicas.recorder.retries == ["stalled"]
    assert replicas.recorder.events == [("answered", False)]
    assert replicas.queries[0].budget_s == pytest.approx(0.4, abs=0.005)


async def test_without_a_name_the_model_s_own_head_is_meant() -> None:
    own = RegisteredTask("digits", own_task("zoo/x", 2), ("cat", "dog"), 60_000.0, 1.0, 0)
    planner = TaskPlanner(own)
    vision, *_ = service(planner=planner)
    assert (await vision.classify([WHITE], VisionParameters()))[0].labels == ["cat", "dog"]
    planner.catalog.put({"digits/parity": task()})
    assert (await vision.classify([WHITE], VisionParameters()))[0].labels == ["cat", "dog"]
    assert (await vision.classify([WHITE], VisionParameters(task="parity")))[0].labels == ["even", "odd"]
    assert (await vision.classify([WHITE], VisionParameters(task="model")))[0].labels == ["cat", "dog"]


async def test_which_task_is_meant() -> None:
    planner = TaskPlanner(task())
    vision, _, follower = service(planner=planner)
    await vision.classify([WHITE], VisionParameters())
    planner.catalog.put({"digits/large": task("large")})
    await vision.classify([WHITE], VisionParameters(task="large"))
    error = await refused(vision.classify([WHITE], VisionParameters()))
    assert (error.outcome, error.reason) == (
        Outcome.REJECTED,
        "parameters.task: must be given; there are: large, parity",
    )
    error = await refused(vision.classify([WHITE], VisionParameters(task="x")))
    assert (error.fault, error.reason) == (Fault.NOT_FOUND, "digits has no task 'x'; there are: large, parity")
    planner.dead = True
    await vision.classify([WHITE], VisionParameters(task="large"))
    assert (await refused(vision.classify([WHITE], VisionParameters(task="y")))).outcome == Outcome.UNAVAILABLE
    assert not follower.reached


async def test_without_any_task() -> None:
    vision, *_ = service(planner=TaskPlanner())
    error = await refused(vision.classify([WHITE], VisionParameters()))
    assert (error.fault, error.reason) == (Fault.NOT_FOUND, "digits has no task at all; load one")
