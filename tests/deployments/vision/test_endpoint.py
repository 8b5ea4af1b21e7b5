"""The gateway's vision service against scripted replicas: what is answered, retried, refused, and within which time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from pliant.deployments.vision.own_task import own_task
from support.scripted_vision import INFO, Replicas, Reply, TaskPlanner, brightness, service, task
from support.waiting import HANGS_AFTER_S

from pliant.deployments.http.parameters import VisionParameters
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.messages import RegisteredTask
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.vision.messages import Answer, Refusal

pytestmark = pytest.mark.virtual_time

WHITE = np.full((INFO.height, INFO.width, 3), 255, dtype=np.uint8)
BLACK = np.zeros_like(WHITE)
LATE = Answer(np.array([1, 0], dtype="<f4").tobytes(), 2, "late", 1)
FAILED = Refusal("failed", "the computation broke down: OSError")
UNLOADED = Refusal("task", "task parity: is broken", 0.1)


async def refused(call: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        await call
    return error.value


async def test_images_are_answered_with_the_labels_of_their_task() -> None:
    replicas = Replicas()
    vision, recorder, table, _ = service(replicas, TaskPlanner(task(), task("large", ("small", "big", "huge"))))
    [white, black] = await vision.classify([WHITE, BLACK], VisionParameters(task="parity"))
    assert (white.labels, black.labels) == (["even", "odd"], ["odd", "even"])
    assert sum(white.scores) == pytest.approx(1)
    assert (white.gamma, white.fate) == (-4, "in_time")
    [best] = await vision.classify([BLACK], VisionParameters(task="large", top_k=1, function_to_apply="none"))
    assert (best.labels, best.scores) == (["big"], [1.0])
    assert recorder.events == [("answered", "parity", True, -4)] * 2 + [("answered", "large", True, -4)]
    assert [ticket.replica for ticket in replicas.tickets] == ["a", "b", "c"]
    assert all(report["outstanding"] == 0 for report in table.replicas().values())


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
    replicas = Replicas()
    vision, *_ = service(replicas, TaskPlanner(task()._replace(slo_ms=50_000.0)), **options)
    await vision.classify([WHITE], VisionParameters(**parameters))
    [ticket] = replicas.tickets
    assert budget_s / 2 < ticket.query.budget_s < budget_s
    assert ticket.query.utility == utility


async def test_a_late_answer_is_one() -> None:
    vision, recorder, *_ = service(Replicas(LATE))
    [prediction] = await vision.classify([WHITE], VisionParameters())
    assert (prediction.fate, prediction.gamma) == ("late", 2)
    assert recorder.events == [("answered", "parity", False, 2)]
    assert recorder.ends == [Outcome.OK]


@pytest.mark.parametrize(
    ("kind", "outcome", "fault"),
    [
        ("shed", Outcome.SHED, None),
        ("evicted", Outcome.SHED, Fault.EVICTED),
        ("expired", Outcome.TOO_LATE, None),
    ],
)
async def test_refusals_are_told_at_once(kind: Any, outcome: Outcome, fault: Fault | None) -> None:
    replicas = Replicas(Refusal(kind, "so it is", 0.5))
    vision, recorder, *_ = service(replicas)
    error = await refused(vision.classify([WHITE], VisionParameters()))
    assert (error.outcome, error.fault, error.reason) == (outcome, fault, "digits: so it is")
    assert error.retry_after_s == 0.5
    assert len(replicas.tickets) == 1
    assert recorder.ends == [outcome]
    assert not recorder.events


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
    replicas = Replicas(trouble, trouble, brightness)
    vision, recorder, *_ = service(replicas)
    [prediction] = await vision.classify([WHITE], VisionParameters(slo_ms=60_000.0))
    assert prediction.labels[0] == "even"
    assert recorder.events[:2] == [event] * 2
    assert len({ticket.replica for ticket in replicas.tickets}) == 3


async def test_an_image_that_breaks_every_replica_is_given_up() -> None:
    replicas = Replicas(FAILED)
    vision, _, table, _ = service(replicas)
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)))
    assert (error.outcome, error.reason) == (Outcome.FAILED, "digits: the computation broke down: OSError")
    assert len(replicas.tickets) == 3
    assert {table.choose() for _ in range(3)} == {"a", "b", "c"}, "all are free again"


@pytest.mark.parametrize("replicas", [2, 5])
async def test_a_task_that_no_replica_can_load_is_given_up(replicas: int) -> None:
    asked = Replicas(UNLOADED)
    vision, recorder, *_ = service(asked, names=tuple(map(str, range(replicas))))
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)))
    assert (error.outcome, error.reason, error.retry_after_s) == (
        Outcome.UNAVAILABLE,
        "digits: task parity: is broken",
        0.1,
    )
    assert len(asked.tickets) == min(replicas, 3)
    assert recorder.ends == [Outcome.UNAVAILABLE]


async def test_a_task_that_was_replaced_is_asked_for_anew() -> None:
    planner = TaskPlanner(task())
    newer = task(labels=("odd", "even"))
    newer = newer._replace(task=newer.task._replace(revision="2"))

    def replaced(_: Any) -> Refusal:
        planner.board.put({"digits/parity": newer})
        return UNLOADED

    asked = Replicas(replaced, brightness)
    vision, *_ = service(asked, planner, names=("a",))
    [prediction] = await vision.classify([WHITE], VisionParameters(slo_ms=60_000.0))
    assert (prediction.labels[0], asked.tickets[-1].query.task) == ("odd", newer.task)
    planner.board.put({"digits/parity": None})
    asked.replies = [UNLOADED]
    assert (await refused(vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)))).fault == Fault.NOT_FOUND


async def test_a_task_that_replicas_only_try_cannot_be_named() -> None:
    planner = TaskPlanner(task(), task("large")._replace(coming=True))
    vision, *_ = service(planner=planner)
    await vision.classify([WHITE], VisionParameters())
    assert [entry.task.name for entry in vision.tasks()] == ["parity"]
    assert (await refused(vision.classify([WHITE], VisionParameters(task="large")))).fault == Fault.NOT_FOUND


async def test_what_nobody_expects_is_recorded() -> None:
    vision, recorder, *_ = service(Replicas(ValueError("what")))
    with pytest.raises(ValueError, match="what"):
        await vision.classify([WHITE], VisionParameters())
    assert recorder.ends == [Outcome.FAILED]


async def test_answers_have_so_many_labels_only() -> None:
    vision, *_ = service(planner=TaskPlanner(task(labels=tuple(map(str, range(30_000))))))
    error = await refused(vision.classify([WHITE] * 4, VisionParameters()))
    assert error.outcome == Outcome.REJECTED
    assert error.reason.endswith("; send at most 16384, or fewer images")
    assert len(await vision.classify([WHITE] * 4, VisionParameters(top_k=5))) == 4


async def test_it_is_ready_when_its_tasks_are_known() -> None:
    vision, _, _, follower = service()
    assert not vision.ready
    await follower.catch_up()
    assert vision.ready


async def test_without_replicas_requests_wait_until_their_deadline() -> None:
    vision, _, table, _ = service(names=())
    assert not vision.ready
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=80.0)))
    assert (error.outcome, error.reason) == (Outcome.UNAVAILABLE, "no replica of digits could be reached in time")
    assert error.retry_after_s == 1
    waiting = asyncio.create_task(vision.classify([WHITE], VisionParameters(slo_ms=60_000.0)))
    await asyncio.sleep(0.01)
    table.sync({"a": None})
    assert vision.ready
    assert (await waiting)[0].labels[0] == "even"


async def test_one_bad_image_fails_the_request_and_frees_the_replicas() -> None:
    vision, recorder, *_ = service()
    error = await refused(vision.classify([WHITE, b"no image"], VisionParameters()))
    assert error.fault == Fault.MEDIA_TYPE
    assert Outcome.REJECTED in recorder.ends


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
    class Never(Replicas):
        async def __call__(self, ticket: Any) -> Any:
            await asyncio.Event().wait()

    vision, _, table, _ = service(Never())
    call = asyncio.create_task(vision.classify([WHITE, BLACK], VisionParameters(slo_ms=60_000.0)))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.wait([call])
    assert [table.choose() for _ in range(3)].count("c") == 1


async def test_a_service_that_hangs_ends_in_time() -> None:
    class Never(Replicas):
        async def __call__(self, ticket: Any) -> Any:
            await asyncio.Event().wait()

    vision, *_ = service(Never(), timeout_s=0.05)
    error = await refused(vision.classify([WHITE], VisionParameters(slo_ms=1000.0)))
    assert (error.outcome, error.reason) == (Outcome.UNAVAILABLE, "no replica of digits answered within 1 s")


async def test_without_a_name_the_model_s_own_head_is_meant() -> None:
    own = RegisteredTask("digits", own_task("zoo/x", 2), ("cat", "dog"), 60_000.0, 1.0, 0)
    planner = TaskPlanner(own)
    vision, *_ = service(planner=planner)
    assert (await vision.classify([WHITE], VisionParameters()))[0].labels == ["cat", "dog"]
    planner.board.put({"digits/parity": task()})
    assert (await vision.classify([WHITE], VisionParameters()))[0].labels == ["cat", "dog"]
    assert (await vision.classify([WHITE], VisionParameters(task="parity")))[0].labels == ["even", "odd"]
    assert (await vision.classify([WHITE], VisionParameters(task="model")))[0].labels == ["cat", "dog"]


async def test_which_task_is_meant() -> None:
    planner = TaskPlanner(task())
    vision, _, _, follower = service(planner=planner)
    await vision.classify([WHITE], VisionParameters())
    planner.board.put({"digits/large": task("large")})
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
    assert not follower.facts()["planner_reached"]


async def test_without_any_task() -> None:
    vision, *_ = service(planner=TaskPlanner())
    error = await refused(vision.classify([WHITE], VisionParameters()))
    assert (error.fault, error.reason) == (Fault.NOT_FOUND, "digits has no task at all; load one")
