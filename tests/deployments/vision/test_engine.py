"""The vision engine on a device that only sleeps, in time that nobody waits for: each query is answered once.

Or it is told why not, as soon as that is certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import virtual_loop

from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.tenants import Tenant
from pliant.deployments.vision.engine import Engine
from pliant.deployments.vision.messages import Answer, Query
from pliant.deployments.vision.queue import Waiting
from pliant.deployments.vision.report import ReplicaReport
from pliant.deployments.vision.tasks import TaskReconciler, Tasks, key
from pliant.deployments.vision.valuer import ImageValuer
from pliant.formats.vision_task import TaskError, TaskRef
from pliant.policies.vision.token_adaptation import Algorithm2Policy, ExactPolicy, Policy
from pliant.policies.vision.token_profile import TokenProfile

ACCURACY = {-4: 0.7, 0: 0.9, 2: 0.95}
GAMMAS = tuple(ACCURACY)
LOAD_S = 0.2


def latency(gamma: int, rows: int) -> float:
    return (0.01 + 0.001 * rows) * (1 + gamma / 10)


def task(name: str, prompts: tuple[int, ...] = (2,)) -> TaskRef:
    return TaskRef(name, f"/tasks/{name}", "1", 2, prompts)


def query(number: int = 0, budget_s: float = 1.0, utility: float = 1.0, name: str = "a") -> Query:
    return Query(bytes([number, 7]), task(name, () if name == "plain" else (2,)), budget_s, utility)


@dataclass
class Device:
    """Takes as long as the profile says, times `slow`; the first logit is the image's first byte."""

    backend: str = "scripted"
    slow: float = 1.0
    failing: Callable[[int], bool] = lambda run: False
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Gamma and images of each."""
    busy: bool = False

    async def ready(self) -> None: ...

    async def run(self, images: Sequence[bytes], tasks: Sequence[str], gamma: int) -> Sequence[Any]:
        assert not self.busy
        self.busy = True
        self.runs.append((gamma, len(images)))
        try:
            await asyncio.sleep(latency(gamma, len(images)) * self.slow)
            if self.failing(len(self.runs)):
                raise OSError("no memory")
        finally:
            self.busy = False
        return [np.array([image[0], 0.5], dtype=np.float32) for image in images]


@dataclass
class Loader:
    """Loads every task but the broken ones."""

    broken: set[str] = field(default_factory=set)
    loads: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    async def load(self, task: TaskRef) -> Mapping[int, float]:
        self.loads.append(task.name)
        await asyncio.sleep(LOAD_S)
        if task.name in self.broken:
            raise TaskError(f"task {task.name}: is broken")
        assert key(task) not in self.held
        self.held.add(key(task))
        return {gamma: accuracy for gamma, accuracy in ACCURACY.items() if gamma <= 0 or gamma in task.prompts}

    async def unload(self, task: TaskRef) -> None:
        self.held.remove(key(task))


class House:
    """An engine with all that it needs; tasks a and plain are in memory from the start."""

    def __init__(
        self, limit: int = 64, policy: type[Policy[Any]] | None = None, wrong: float = 1.0, **device: Any
    ) -> None:
        """The profile says `wrong` times the latencies that there are."""
        self.device, self.loader = Device(**device), Loader()
        self.tasks = Tasks(self.loader)
        profile = TokenProfile(GAMMAS, lambda *run: wrong * latency(*run), self.tasks.accuracy, most_rows=8)
        chosen: Policy[Waiting] = (
            Algorithm2Policy(profile) if policy is Algorithm2Policy else ExactPolicy(profile, None)
        )
        self.engine = Engine(self.device, self.tasks, profile, chosen, limit)

    async def __aenter__(self) -> House:
        await TaskReconciler("s", self.tasks).reconcile([task("a"), task("plain", ())])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def ask(self, *queries: Query) -> list[Answer | Refusal]:
        return await asyncio.gather(*(self.engine.classify(each) for each in queries))


def test_each_query_gets_its_own_answer_and_batches_mix_tasks() -> None:
    async def main() -> None:
        async with House() as house:
            names = ["a", "plain"] * 5
            replies = await house.ask(*(query(number, name=name) for number, name in enumerate(names)))
            for number, reply in enumerate(replies):
                assert isinstance(reply, Answer)
                assert np.frombuffer(reply.logits, "<f4").tolist() == [number, 0.5]
                assert (reply.fate, reply.gamma) == ("in_time", 0), "plain has no prompts"
            assert sum(rows for _, rows in house.device.runs) == 10
            assert len(house.device.runs) <= 3
            report = house.engine.report()
            assert (report["in_time"], report["waiting"], report["running"]) == (10, 0, 0)
            assert report["utility"] == pytest.approx(9)
            assert report["tasks"] == ["a", "plain"]
            assert report["gammas"][0]["images"] == 10

    virtual_loop.run(main())


@pytest.mark.parametrize("policy", [ExactPolicy, Algorithm2Policy])
def test_gamma_falls_in_a_burst_and_recovers(policy: type[Policy[Any]]) -> None:
    async def main() -> None:
        async with House(limit=1000, policy=policy) as house:
            await asyncio.sleep(1)
            await house.ask(query(budget_s=0.5))
            await asyncio.sleep(3)
            await house.ask(query(budget_s=0.5))
            await house.ask(*(query(budget_s=0.25, utility=0.5) for _ in range(200)))
            await asyncio.sleep(3)
            await house.ask(query(budget_s=0.5))
            gammas = [gamma for gamma, _ in house.device.runs]
            assert gammas[0] == gammas[-1] == 2
            assert min(gammas) == -4

    virtual_loop.run(main())


def test_what_images_take_and_earn_is_reported_as_they_come() -> None:
    async def main() -> None:
        async with House() as house:
            assert house.engine.report()["earnings"] == []
            await house.ask(*(query(number, utility=3) for number in range(4)))
            report = house.engine.report()
            seconds, earned = zip(*report["earnings"], strict=True)
            assert list(seconds) == pytest.approx(sorted(latency(gamma, 8) / 8 for gamma in GAMMAS))
            assert list(earned) == pytest.approx([3 * accuracy for accuracy in sorted(ACCURACY.values())])
            assert report["slo_s"] == pytest.approx(1)
            await house.ask(*(query(number, budget_s=0.001) for number in range(30)))
            assert house.engine.report()["earnings"] == [], "no batch is in time for most"

    virtual_loop.run(main())


@pytest.mark.parametrize("rate", [200, 350, 500, 1000])
def test_what_a_replica_is_said_to_earn_is_what_it_does(rate: int) -> None:
    async def main() -> None:
        async with House(limit=256) as house:
            rng = np.random.default_rng(0)
            asked, seconds, before = [], 20.0, house.engine.report()["utility"]
            for _ in range(int(seconds / 0.005)):
                asked += [
                    asyncio.create_task(house.engine.classify(query(budget_s=0.3)))
                    for _ in range(int(rng.poisson(rate * 0.005)))
                ]
                await asyncio.sleep(0.005)
            await asyncio.gather(*asked)
            report = house.engine.report()
            filled = ReplicaReport(**report, version=0, held={}, served=0, compiling=False, dropped={}, failed_tasks={})
            value = ImageValuer().value([filled], len(asked) / seconds, 0.0, 2)
            assert value is not None
            best = max(earned for _, earned in report["earnings"])
            earned = (report["utility"] - before) / len(asked) / best
            assert -0.01 <= earned - value.in_time[1] <= 0.07, "deciding takes no time here, for which a tenth is kept"

    virtual_loop.run(main())


def test_what_cannot_be_in_time_any_more_is_evicted_at_once() -> None:
    async def main() -> None:
        async with House(slow=20) as house:
            loop = asyncio.get_running_loop()
            started = loop.time()
            slow = asyncio.create_task(house.engine.classify(query(budget_s=10.0)))
            await asyncio.sleep(0.001)
            reply = await house.engine.classify(query(budget_s=0.05))
            assert isinstance(reply, Refusal)
            assert (reply.outcome, reply.fault, slow.done()) == (Outcome.SHED, Fault.EVICTED, False), (
                "long before the device is free"
            )
            assert loop.time() - started < 0.05
            assert "could not be answered before its deadline" in reply.reason
            assert isinstance(await slow, Answer)
            assert house.engine.report()["evicted"] == 1

    virtual_loop.run(main())


def test_what_waits_behind_a_batch_that_stalls_may_be_answered_by_another_replica() -> None:
    async def main() -> None:
        async with House(slow=1000) as house:
            hangs = asyncio.create_task(house.engine.classify(query(budget_s=60.0)))
            await asyncio.sleep(0.001)
            reply = await house.engine.classify(query(budget_s=1.0))
            assert isinstance(reply, Refusal)
            assert (reply.cause, hangs.done()) == ("failed", False)
            assert isinstance(await hangs, Answer)
            report = house.engine.report()
            assert (report["failed"], report["evicted"]) == (1, 0)

    virtual_loop.run(main())


def test_without_time_nothing_is_tried() -> None:
    async def main() -> None:
        async with House() as house:
            for budget_s in (0.0, -1.0, 0.001):
                reply = await house.engine.classify(query(budget_s=budget_s))
                assert isinstance(reply, Refusal)
                assert reply.cause == "final"
                assert (reply.outcome, reply.fault) in ((Outcome.TOO_LATE, None), (Outcome.SHED, Fault.EVICTED))
                assert reply.retry_after_s
            assert house.device.runs == []
            assert house.engine.report()["evicted"] == 3

    virtual_loop.run(main())


def test_a_late_answer_is_given_as_such_and_the_policy_learns() -> None:
    async def main() -> None:
        async with House(slow=3) as house:
            first = await house.engine.classify(query(budget_s=0.02))
            assert isinstance(first, Answer)
            assert first.fate == "late"
            assert house.engine.report()["slowdown"] == pytest.approx(3, rel=0.01)
            later = await asyncio.gather(*(house.engine.classify(query(budget_s=0.2)) for _ in range(30)))
            assert not [reply for reply in later if isinstance(reply, Answer) and reply.fate == "late"]
            assert [reply for reply in later if isinstance(reply, Answer)]

    virtual_loop.run(main())


def test_an_overload_of_a_slow_device_makes_no_late_answers() -> None:
    async def main() -> None:
        async with House(limit=1000, slow=2) as house:
            await house.ask(query())
            calls = []
            for _ in range(1000):
                calls.append(asyncio.create_task(house.engine.classify(query(budget_s=0.3))))
                await asyncio.sleep(0.0025)
            await asyncio.gather(*calls)
            report = house.engine.report()
            assert report["late"] == 0
            assert report["in_time"] > 0.8 * 8 / (2 * latency(-4, 8)) * 2.5, "of what the device can do meanwhile"
            assert report["evicted"] + report["in_time"] == 1001

    virtual_loop.run(main())


def test_a_device_that_was_slow_is_believed_again() -> None:
    async def main() -> None:
        async with House(slow=3.9) as house:
            await house.engine.classify(query(budget_s=1))
            house.device.slow = 1
            reply = await house.engine.classify(query(budget_s=0.02))
            assert isinstance(reply, Refusal)
            await asyncio.sleep(1.1)
            reply = await house.engine.classify(query(budget_s=0.02))
            assert isinstance(reply, Answer)
            assert reply.fate == "in_time"

    virtual_loop.run(main())


@pytest.mark.parametrize(("wrong", "budget_s"), [(100, 0.6), (40, 0.25), (2.5, 0.02)])
def test_a_profile_that_is_too_high_does_not_refuse_everything_for_ever(wrong: float, budget_s: float) -> None:
    async def main() -> None:
        async with House(wrong=wrong) as house:
            replies = []
            for _ in range(20):
                replies.append(await house.engine.classify(query(budget_s=budget_s)))
                await asyncio.sleep(0.7)
            assert all(isinstance(reply, Answer) and reply.fate == "in_time" for reply in replies[3:]), replies

    virtual_loop.run(main())


def test_what_takes_long_to_decide_is_planned_with() -> None:
    async def main() -> None:
        async with House(limit=256) as house:
            loop, plan = asyncio.get_running_loop(), house.engine._policy.plan

            def slow(batches: Any, now: float) -> Any:
                loop._now += 0.01  # type: ignore[attr-defined]
                return plan(batches, now)

            house.engine._policy.plan = slow  # type: ignore[method-assign]
            calls = []
            for _ in range(600):
                calls.append(asyncio.create_task(house.engine.classify(query(budget_s=0.2))))
                await asyncio.sleep(0.002)
            await asyncio.gather(*calls)
            report = house.engine.report()
            assert report["late"] < 30, "the first ones only"
            assert report["decision_p99_ms"] == 10

    virtual_loop.run(main())


def test_waiting_for_the_device_is_not_slowness() -> None:
    async def main() -> None:
        async with House() as house:

            async def ready() -> None:
                await asyncio.sleep(0.1)

            house.device.ready = ready  # type: ignore[method-assign]
            replies = await house.ask(*(query(budget_s=9) for _ in range(30)))
            assert all(isinstance(reply, Answer) for reply in replies)
            assert house.engine.report()["slowdown"] == pytest.approx(1)

    virtual_loop.run(main())


def test_a_full_queue_sheds_what_is_worth_least() -> None:
    async def main() -> None:
        async with House(limit=4, slow=3) as house:
            running = asyncio.create_task(house.engine.classify(query(budget_s=10)))
            await asyncio.sleep(0.001)
            utilities = (0.5, 0.1, 0.9, 0.7, 0.8, 0.05)
            replies = await house.ask(*(query(budget_s=10, utility=utility) for utility in utilities))
            shed = [u for u, reply in zip(utilities, replies, strict=True) if isinstance(reply, Refusal)]
            assert shed == [0.1, 0.05]
            assert {(reply.cause, reply.outcome) for reply in replies if isinstance(reply, Refusal)} == {
                ("busy", Outcome.SHED)
            }
            await running
            assert house.engine.report()["shed"] == 2

    virtual_loop.run(main())


def test_those_who_leave_are_not_computed() -> None:
    async def main() -> None:
        async with House() as house:
            calls = [asyncio.create_task(house.engine.classify(query(number))) for number in range(4)]
            await asyncio.sleep(0.001)
            calls += [asyncio.create_task(house.engine.classify(query(number))) for number in range(4, 8)]
            await asyncio.sleep(0.001)
            for call in (calls[0], *calls[4:7]):
                call.cancel()
            replies = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(reply) for reply in replies[1:4]] == [Answer] * 3
            assert isinstance(replies[7], Answer)
            assert house.device.runs[1:] == [(2, 1)]
            assert house.engine.report()["in_time"] == 4
            assert house.engine.report()["waiting"] == 0

    virtual_loop.run(main())


def test_one_batch_that_breaks_down_harms_no_other() -> None:
    async def main() -> None:
        async with House(failing=lambda run: run == 1) as house:
            [reply] = await house.ask(query())
            assert isinstance(reply, Refusal)
            assert (reply.cause, reply.reason) == ("failed", "the computation broke down: OSError")
            assert isinstance((await house.ask(query()))[0], Answer)
            assert house.engine.failure is None
            assert house.engine.report()["failed"] == 1

    virtual_loop.run(main())


def test_a_device_that_always_breaks_down_breaks_the_engine() -> None:
    async def main() -> None:
        async with House(failing=lambda run: True) as house:
            replies = [(await house.ask(query()))[0] for _ in range(4)]
            assert all(isinstance(reply, Refusal) and reply.cause == "failed" for reply in replies)
            assert len(house.device.runs) == 3
            assert isinstance(house.engine.failure, OSError)

    virtual_loop.run(main())


def test_an_answer_that_is_none_is_a_failure() -> None:
    async def main() -> None:
        async with House() as house:
            house.device.run = lambda *_: asyncio.sleep(0.01, [None])  # type: ignore[method-assign, assignment, arg-type, return-value]
            assert await house.ask(query()) == [Refusal("failed", "the computation broke down: AttributeError")]

    virtual_loop.run(main())


@pytest.mark.parametrize("closes", [True, False])
def test_who_waits_for_a_task_while_the_engine_breaks_is_told(closes: bool) -> None:
    async def main() -> None:
        async with House(failing=lambda run: True) as house:
            waiting = asyncio.create_task(house.engine.classify(query(name="new", budget_s=20)))
            await asyncio.sleep(0.01)
            if closes:
                await house.engine.close()
            for _ in range(3):
                await house.ask(query())
            reply = await waiting
            assert isinstance(reply, Refusal)
            assert reply.cause == "failed"
            assert asyncio.get_running_loop().time() < 1

    virtual_loop.run(main())


def test_a_policy_that_fails_leaves_nobody_waiting() -> None:
    async def main() -> None:
        async with House() as house:
            house.engine._policy.plan = lambda batches, now: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            replies = await house.ask(query(), query())
            assert all(isinstance(reply, Refusal) and reply.cause == "failed" for reply in replies)
            assert isinstance(house.engine.failure, ZeroDivisionError)

    virtual_loop.run(main())


def test_closing_refuses_what_is_computed_and_what_waits() -> None:
    async def main() -> None:
        house = House()
        async with house:
            calls = [asyncio.create_task(house.engine.classify(query(budget_s=9))) for _ in range(20)]
            await asyncio.sleep(0.001)
        assert all(isinstance(call, Refusal) and call.cause == "failed" for call in await asyncio.gather(*calls))

    virtual_loop.run(main())


def test_an_unknown_task_is_brought_by_its_first_image() -> None:
    async def main() -> None:
        async with House() as house:
            house.loader.broken.add("bad")
            good, same, bad, hasty = await house.ask(
                query(name="new"), query(name="new"), query(name="bad"), query(name="new", budget_s=0.1)
            )
            assert isinstance(good, Answer)
            assert isinstance(same, Answer)
            assert bad == Refusal("unable", "task bad: is broken", 0.1)
            assert isinstance(hasty, Refusal)
            assert (hasty.fault, hasty.reason) == (Fault.EVICTED, "its time was over before the task new was in memory")
            assert house.loader.loads == ["a", "plain", "new", "bad"]
            assert isinstance((await house.ask(query(name="bad")))[0], Refusal)
            assert house.loader.loads.count("bad") == 1, "it is not tried again at once"
            await asyncio.sleep(6)
            house.loader.broken.clear()
            assert isinstance((await house.ask(query(name="bad")))[0], Answer)

    virtual_loop.run(main())


def test_tasks_make_room_for_others_unless_they_are_in_use() -> None:
    async def main() -> None:
        loader = Loader()
        tasks = Tasks(loader, most=2)
        one, two, three = map(task, "123")
        await tasks.acquire(one)
        await tasks.acquire(two)
        with pytest.raises(TaskError, match="2 tasks are in use, as many as a replica holds"):
            await tasks.acquire(three)
        tasks.release(one)
        await tasks.acquire(three)
        assert loader.held == {key(two), key(three)}
        await tasks.forget(two)
        assert loader.held == {key(two), key(three)}, "images still need it"
        tasks.release(two)
        await asyncio.sleep(0)
        assert loader.held == {key(three)}
        assert tasks.accuracy(key(two), 0) is None
        assert tasks.accuracy(key(three), 0) == 0.9

    virtual_loop.run(main())


def test_tasks_take_so_many_bytes_together_and_no_more() -> None:
    async def main() -> None:
        loader = Loader()
        sizes = {"1": 40, "2": 60, "3": 50, "4": 101}
        tasks = Tasks(loader, size=lambda task: sizes[task.name], most_bytes=100)
        one, two, three, four = map(task, "1234")
        await tasks.acquire(one)
        await tasks.acquire(two)
        tasks.release(one)
        with pytest.raises(TaskError, match="1 tasks are in use, as many as a replica holds"):
            await tasks.acquire(three)
        tasks.release(two)
        await tasks.acquire(three)
        assert loader.held == {key(three)}
        with pytest.raises(TaskError, match="takes 101 bytes, for at most 100 of all tasks"):
            await tasks.acquire(four)
        assert loader.held == {key(three)}

    virtual_loop.run(main())


def test_registered_tasks_are_brought_and_others_removed() -> None:
    async def main() -> None:
        loader = Loader(broken={"3"})
        reconciler = TaskReconciler("s", Tasks(loader))
        one, two, three = map(task, "123")
        await reconciler.reconcile([one, two, three])
        await reconciler.reconcile([two, three, two._replace(revision="2")])
        assert loader.held == {key(two), key(two._replace(revision="2"))}
        assert loader.loads == ["1", "2", "3", "2"]
        assert reconciler.failed == {three: "task 3: is broken"}
        await reconciler.reconcile([])
        assert not reconciler.failed

    virtual_loop.run(main())


def test_a_task_that_takes_the_place_of_another_is_there_first() -> None:
    async def main() -> None:
        tasks = Tasks(Loader())
        reconciler = TaskReconciler("s", tasks)
        old, new = task("a"), task("a")._replace(revision="2")
        await reconciler.reconcile([old])
        settling = asyncio.create_task(reconciler.reconcile([new]))
        await asyncio.sleep(LOAD_S / 2)
        assert old in tasks
        await settling
        assert (old in tasks, new in tasks) == (False, True)

    virtual_loop.run(main())


def test_whatever_a_load_raises_is_told_and_harms_nothing_else() -> None:
    async def main() -> None:
        class Full(Loader):
            async def load(self, task: TaskRef) -> Mapping[int, float]:
                if task.name == "big":
                    raise MemoryError("no more")
                return await super().load(task)

        tasks = Tasks(Full())
        await TaskReconciler("s", tasks).reconcile([task("big"), task("a")])
        assert tasks.names() == ["a"]
        errors = []
        for _ in range(2):
            with pytest.raises(TaskError, match="task big: cannot be loaded: MemoryError: no more") as error:
                await tasks.acquire(task("big"))
            errors.append(error.value)
        assert errors[0] is not errors[1], "else it would keep all who were told"

    virtual_loop.run(main())


def test_tasks_are_measured_while_they_are_in_use() -> None:
    async def main() -> None:
        measured = []

        async def measure(task: TaskRef) -> Mapping[int, float] | None:
            await asyncio.sleep(10)
            measured.append(task.name)
            if task.name == "bad":
                raise OSError("gone")
            return {0: 0.5} if task.name == "a" else None

        tasks = Tasks(Loader(), measure=measure)
        for name in ("a", "b", "bad", "left"):
            await tasks.acquire(task(name))
        assert (asyncio.get_running_loop().time(), tasks.accuracy(key(task("a")), 0)) == (pytest.approx(0.8), 0.9)
        tasks.release(task("left"))
        await tasks.forget(task("left"))
        version = tasks.version
        await tasks.measured()
        assert measured == ["a", "b", "bad"]
        assert [tasks.accuracy(key(task(name)), 0) for name in ("a", "b", "bad")] == [0.5, 0.9, 0.9]
        assert tasks.version == version + 1

    virtual_loop.run(main())


@dataclass(frozen=True)
class Visit:
    after_s: float
    budget_s: float
    utility: float
    name: str
    leaves_s: float | None


visits = st.builds(
    Visit,
    after_s=st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.2]),
    budget_s=st.floats(-0.01, 0.6),
    utility=st.floats(1e-6, 2),
    name=st.sampled_from(["a", "a", "plain", "new", "bad"]),
    leaves_s=st.none() | st.floats(0, 0.3),
)


@given(
    crowd=st.lists(visits, max_size=40),
    limit=st.integers(1, 20),
    slow=st.floats(0.3, 6),
    failing=st.sets(st.integers(1, 12), max_size=4),
    policy=st.sampled_from([ExactPolicy, Algorithm2Policy]),
)
@settings(max_examples=40)
def test_whatever_comes_each_query_is_answered_once(
    crowd: list[Visit], limit: int, slow: float, failing: set[int], policy: type[Policy[Any]]
) -> None:
    async def main() -> None:
        async with House(limit=limit, policy=policy, slow=slow, failing=lambda run: run in failing) as house:
            house.loader.broken.add("bad")
            loop = asyncio.get_running_loop()
            told: dict[int, tuple[Answer | Refusal, float]] = {}

            async def visit(number: int, visitor: Visit) -> None:
                came = loop.time()
                async with asyncio.timeout(visitor.leaves_s):
                    reply = await house.engine.classify(query(number, visitor.budget_s, visitor.utility, visitor.name))
                assert number not in told
                told[number] = reply, loop.time() - came

            calls = []
            for number, visitor in enumerate(crowd):
                await asyncio.sleep(visitor.after_s)
                calls.append(asyncio.create_task(visit(number, visitor)))
                assert house.engine.report()["waiting"] <= 2 * limit
            async with asyncio.timeout(60):
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for number, (visitor, outcome) in enumerate(zip(crowd, outcomes, strict=True)):
                if isinstance(outcome, TimeoutError):
                    assert visitor.leaves_s is not None
                    continue
                assert outcome is None
                reply, seconds = told[number]
                if isinstance(reply, Answer):
                    assert np.frombuffer(reply.logits, "<f4")[0] == number
                    assert (reply.fate == "in_time") == (seconds <= visitor.budget_s + 1e-9)
                    assert visitor.name != "plain" or reply.gamma <= 0
                elif reply.cause != "failed":
                    assert seconds <= max(visitor.budget_s, 0) + 0.002, "told at once, not when the device is free"
            await asyncio.sleep(1)
            report = house.engine.report()
            assert (report["waiting"], report["running"]) == (0, 0)
            answers = [reply for reply, _ in told.values() if isinstance(reply, Answer)]
            assert report["in_time"] + report["late"] == len(answers)
            for ref in (task("a"), task("plain", ()), task("new")):
                await house.tasks.forget(ref)
            assert house.tasks.names() == [], "needed by nobody any more"

    virtual_loop.run(main())


def test_what_runs_next_is_chosen_while_a_batch_runs() -> None:
    async def scene() -> None:
        async with House() as house:
            policy, busy = house.engine._policy, list[bool]()
            choose = policy.plan

            def plan(batches: Any, now: float) -> Any:
                busy.append(house.device.busy)
                return choose(batches, now)

            policy.plan = plan  # type: ignore[method-assign]
            answers = await asyncio.gather(*(house.engine.classify(query(number)) for number in range(20)))
            assert all(isinstance(answer, Answer) for answer in answers)
            assert len(house.device.runs) == len(busy) == 3
            assert busy == [False, True, True]

    virtual_loop.run(scene())


GREEDY, MODEST = Tenant("greedy"), Tenant("modest")


@pytest.mark.parametrize("policy", [ExactPolicy, Algorithm2Policy])
def test_one_tenant_does_not_hold_up_another_whatever_its_images_are_worth(policy: type[Policy[Any]]) -> None:
    async def main() -> None:
        async with House(limit=1000, policy=policy) as house:
            greedy = [query(budget_s=3600, utility=1e6)._replace(tenant=GREEDY) for _ in range(500)]
            many = asyncio.create_task(house.ask(*greedy))
            await asyncio.sleep(0.1)
            modest = [query(1, budget_s=0.2)._replace(tenant=MODEST) for _ in range(8)]
            replies = await house.ask(*modest)
            assert [reply.fate for reply in replies if isinstance(reply, Answer)] == ["in_time"] * 8
            assert not many.done()
            assert all(isinstance(reply, Answer) for reply in await many)

    virtual_loop.run(main())


def test_a_batch_is_no_longer_than_others_can_wait() -> None:
    async def main() -> None:
        async with House(slow=1.0) as house:
            await house.ask(query(budget_s=0.026)._replace(tenant=MODEST))
            await house.ask(*(query(budget_s=3600)._replace(tenant=GREEDY) for _ in range(40)))
            assert max(latency(*run) for run in house.device.runs[1:]) <= 0.013 * 1.2
            await asyncio.sleep(100)
            house.device.runs.clear()
            await house.ask(*(query(budget_s=3600)._replace(tenant=GREEDY) for _ in range(40)))
            assert max(rows for _, rows in house.device.runs) == 8, "nobody else came for long"

    virtual_loop.run(main())


def test_images_of_several_tenants_run_together_if_they_are_alike() -> None:
    async def main() -> None:
        async with House() as house:
            alike = [query(number)._replace(tenant=Tenant("abcd"[number % 4])) for number in range(8)]
            assert all(isinstance(reply, Answer) for reply in await house.ask(*alike))
            assert len(house.device.runs) <= 2

    virtual_loop.run(main())


def test_a_full_queue_sheds_of_who_is_furthest_over_its_share() -> None:
    async def main() -> None:
        async with House(limit=16) as house:
            first = asyncio.create_task(house.ask(query()))
            await asyncio.sleep(0.001)
            greedy = [query(budget_s=3600, utility=1000.0 + n)._replace(tenant=GREEDY) for n in range(20)]
            many = asyncio.create_task(house.ask(*greedy))
            await asyncio.sleep(0.001)
            modest = await house.ask(*(query()._replace(tenant=MODEST) for _ in range(4)))
            assert all(isinstance(reply, Answer) for reply in modest)
            shed = [index for index, reply in enumerate(await many) if isinstance(reply, Refusal)]
            assert shed == list(range(8)), "those of its own that are worth the least"
            assert house.engine.report()["shed"] == 8
            await first

    virtual_loop.run(main())
