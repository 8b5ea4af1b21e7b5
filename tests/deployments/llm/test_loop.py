"""The engine's thread, and the coroutines that wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest
from support.scripted_executor import EOS, ScriptedAdapters, ScriptedExecutor, adapter, byte_tokenizer, expected
from support.waiting import HANGS_AFTER_S, until
from torch import Tensor

from pliant.deployments.llm.adapter_loader import AdapterLoader, AdapterLoadError
from pliant.deployments.llm.engine import BrokenError, Engine, Item, TooLongError
from pliant.deployments.llm.loop import EngineLoop, StandstillError
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.formats.adapter_info import AdapterRef
from pliant.kernels.decoder.decode_step import Launched, Step
from pliant.policies.llm.decode_admission import QueueFullError
from pliant.sampling import Sampling

TOKENIZER = byte_tokenizer()


class Gated(ScriptedExecutor):
    """Launches a step for every permit, and then waits for the next."""

    def __init__(self, permits: int = 10**6, **options: Any) -> None:
        super().__init__(**options)
        self._permits = threading.Semaphore(permits)

    def permit(self, steps: int) -> None:
        self._permits.release(steps)

    def launch(self, step: Step) -> Launched:
        assert self._permits.acquire(timeout=HANGS_AFTER_S)
        return super().launch(step)


def generation(id: str = "a", max_tokens: int = 10, prompt: int = 5, **options: Any) -> Generation:
    sampling = Sampling(seed=sum(id.encode()))
    return Generation(id, tuple(range(prompt)), max_tokens, sampling, ignore_eos=True, **options)


Start = Callable[..., EngineLoop]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    loops = []
    executors = []

    def start(executor: Gated, queue: int = 100, **options: Any) -> EngineLoop:
        executors.append(executor)
        loader = options.pop("loader", None)
        engine = Engine(executor, TOKENIZER, (EOS,), queue, 0.05, debug=True, loader=loader)
        loops.append(EngineLoop(engine, **options))
        return loops[-1]

    yield start
    for executor in executors:
        executor.permit(10**6)
    for loop in loops:
        loop.close()


async def answer(loop: EngineLoop, wanted: Generation) -> Piece:
    return merged([piece async for piece in loop.generate(wanted) if piece])


async def after_signs(pieces: AsyncIterator[Piece | None]) -> Piece:
    """The next piece, however many signs of life come before it."""
    while not (piece := await anext(pieces)):
        pass
    return piece


@pytest.mark.parametrize("pipelined", [False, True])
async def test_many_at_once_get_their_own_answers(start: Start, pipelined: bool) -> None:
    loop = start(Gated(slots=8, pipelined=pipelined))
    asked = [generation(f"r{index}", max_tokens=1 + index % 20) for index in range(64)]
    answers = await asyncio.gather(*(answer(loop, wanted) for wanted in asked))
    assert [list(got.tokens) for got in answers] == [expected(wanted, 64) for wanted in asked]
    assert loop.report()["served"] == 64


async def test_a_consumer_that_looks_away_gets_one_piece(start: Start) -> None:
    executor = Gated(permits=1)
    loop = start(executor)
    async with aclosing(loop.generate(generation(max_tokens=30))) as pieces:
        assert len((await after_signs(pieces)).tokens) == 1
        executor.permit(100)
        await until(lambda: loop.report()["served"] == 1)
        await asyncio.sleep(0.01)
        rest = [piece async for piece in pieces if piece]
    assert [len(piece.tokens) for piece in rest] == [29]
    assert rest[0].finish == "length"


async def test_closing_an_answer_frees_its_slot(start: Start) -> None:
    executor = Gated(permits=1, slots=1)
    loop = start(executor)
    pieces = loop.generate(generation("a", max_tokens=50))
    await after_signs(pieces)
    await pieces.aclose()
    executor.permit(3)
    assert len((await answer(loop, generation("b", max_tokens=2))).tokens) == 2
    assert len(executor.steps) <= 4  # of which one may have been on its way for "a"


async def test_a_cancelled_task_frees_its_slot(start: Start) -> None:
    executor = Gated(permits=3)
    loop = start(executor)
    task = asyncio.create_task(answer(loop, generation("a", max_tokens=50)))
    await until(lambda: loop.report()["tokens"] == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    executor.permit(1)
    await until(lambda: loop.report()["live"] == 0)


async def test_the_same_id_again_gets_nothing_of_the_first(start: Start) -> None:
    executor = Gated(permits=2)
    loop = start(executor)
    first = generation("a", max_tokens=50)
    pieces = loop.generate(first)
    await after_signs(pieces)
    await pieces.aclose()
    second = asyncio.create_task(answer(loop, generation("a", max_tokens=4, prompt=9)))
    executor.permit(50)
    assert list((await second).tokens) == expected(generation("a", max_tokens=4, prompt=9), 64)


async def test_what_the_engine_refuses_is_raised(start: Start) -> None:
    executor = Gated(permits=0, slots=1)
    loop = start(executor, queue=1)
    with pytest.raises(TooLongError, match="do not fit into 64 tokens"):
        await answer(loop, generation(prompt=64))
    tasks = [asyncio.create_task(answer(loop, generation(str(index)))) for index in range(5)]
    await until(lambda: loop.stepping_s() > 0)
    executor.permit(1000)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, QueueFullError)]
    assert len(refused) >= 2
    assert all(isinstance(result, Piece | QueueFullError) for result in results)


async def test_a_failed_executor_ends_all_requests(start: Start) -> None:
    loop = start(Gated(slots=2, fails_at=3))
    results = await asyncio.gather(*(answer(loop, generation(id, 50)) for id in "abc"), return_exceptions=True)
    assert all(isinstance(result, BrokenError) for result in results)
    assert isinstance(loop.failure, RuntimeError)
    with pytest.raises(BrokenError, match="out of memory"):
        await answer(loop, generation())


async def test_adapters_are_loaded_while_others_go_on(start: Start) -> None:
    loader = AdapterLoader(ScriptedAdapters())
    loop = start(Gated(slots=4), loader=loader)
    there, missing = adapter("p"), adapter("q", folder="broken")
    asked = [generation(str(index), adapter=(None, there, missing)[index % 3]) for index in range(12)]
    answers = await asyncio.gather(*(answer(loop, wanted) for wanted in asked), return_exceptions=True)
    for wanted, got in zip(asked, answers, strict=True):
        if wanted.adapter == missing:
            assert isinstance(got, AdapterLoadError)
        else:
            assert isinstance(got, Piece)
            assert list(got.tokens) == expected(wanted, 64)
    loop.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        loader.begin(there)


async def test_pieces_come_before_the_error(start: Start) -> None:
    loop = start(Gated(fails_at=3))
    got: list[int] = []

    async def consume() -> None:
        async for piece in loop.generate(generation(max_tokens=50)):
            got.extend(piece.tokens if piece else ())

    with pytest.raises(BrokenError):
        await consume()
    assert got == expected(generation(max_tokens=50), 64)[:3]


async def test_a_defect_in_the_thread_ends_all_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(Gated())

    def fail() -> list[Any]:
        raise AssertionError("defect")

    monkeypatch.setattr(loop._engine, "step", fail)
    with pytest.raises(BrokenError, match="the engine has failed: defect"):
        await answer(loop, generation())
    assert isinstance(loop.failure, AssertionError)


async def test_a_step_that_hangs_shows_and_does_not_keep_anyone(start: Start) -> None:
    loop = start(Gated(permits=0), wait_s=0.05)
    with pytest.raises(StandstillError, match=r"nothing was computed for this request in 0\.05 s"):
        await answer(loop, generation())
    assert loop.stepping_s() > 0


async def test_an_idle_loop_does_not_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(Gated())
    await answer(loop, generation())
    await until(lambda: not loop._engine.busy)
    looked = 0
    busy = Engine.busy.fget  # type: ignore[attr-defined]

    def counted(engine: Engine) -> bool:
        nonlocal looked
        looked += 1
        return bool(busy(engine))

    monkeypatch.setattr(Engine, "busy", property(counted))
    await asyncio.sleep(0.05)
    assert looked <= 2
    assert loop.stepping_s() == 0


async def test_an_idle_loop_steps_as_often_as_the_engine_wants(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "looks_every_s", 0.001)
    loop = start(Gated())
    steps = 0
    step = loop._engine.step

    def counted() -> list[Item]:
        nonlocal steps
        steps += 1
        return step()

    monkeypatch.setattr(loop._engine, "step", counted)
    await until(lambda: steps >= 3)


async def test_a_load_that_hangs_shows_and_does_not_keep_anyone(start: Start) -> None:
    ended = threading.Event()

    class Hanging(ScriptedAdapters):
        def stage(self, ref: AdapterRef) -> Tensor:
            assert ended.wait(HANGS_AFTER_S)
            return super().stage(ref)

    loop = start(Gated(), loader=AdapterLoader(Hanging()), wait_s=0.05)
    with pytest.raises((AdapterLoadError, StandstillError)):
        await answer(loop, generation(adapter=adapter("p")))
    await until(lambda: loop.loading_s() > 0.05)
    loop._wait_s = HANGS_AFTER_S
    with pytest.raises(AdapterLoadError, match=r"p has been read for \d+ s"):
        await answer(loop, generation("b", adapter=adapter("q")))
    assert isinstance(await answer(loop, generation("c")), Piece)
    ended.set()


async def test_a_request_that_waits_is_known_to_live(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.deployments.llm.loop._SIGN_S", 0.01)
    ended = threading.Event()

    class Slow(ScriptedAdapters):
        def stage(self, ref: AdapterRef) -> Tensor:
            assert ended.wait(HANGS_AFTER_S)
            return super().stage(ref)

    loop = start(Gated(), loader=AdapterLoader(Slow()), wait_s=HANGS_AFTER_S)
    wanted = generation(adapter=adapter("p"))
    pieces = loop.generate(wanted)
    for _ in range(3):
        assert await anext(pieces) is None
    ended.set()
    answer = merged([piece async for piece in pieces if piece])
    assert list(answer.tokens) == expected(wanted, 64)


async def looked_after(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Until it was looked so often, from now on, whether somebody stands still, while the engine seems to step."""
    looks = 0
    look_after = loop._look_after

    def counted(*arguments: Any) -> None:
        nonlocal looks
        looks += 1
        look_after(*arguments)

    monkeypatch.setattr(loop, "_look_after", counted)
    monkeypatch.setattr(loop, "stepping_s", lambda: 0.0)
    await until(lambda: looks >= times)


@pytest.fixture
async def full(start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[EngineLoop, Gated]]:
    """A loop that has an answer in its only slot, which goes on by steps that are permitted."""
    monkeypatch.setattr("pliant.deployments.llm.loop._SIGN_S", 0.01)
    executor = Gated(permits=1, slots=1)
    loop = start(executor, wait_s=HANGS_AFTER_S)
    held = asyncio.create_task(answer(loop, generation("held", max_tokens=50)))
    await until(lambda: loop.report()["tokens"] == 1)
    yield loop, executor
    executor.permit(1000)
    assert (await held).finish == "length"


async def overdue(loop: EngineLoop, executor: Gated, wanted: Generation) -> asyncio.Task[Piece]:
    """An answer that has waited for a slot for as long as anybody may stand still."""
    waiting = asyncio.create_task(answer(loop, wanted))
    await until(lambda: loop._commands or loop.report()["waiting"])
    executor.permit(1)
    await until(lambda: loop.report()["waiting"] == 1)
    [*_, inbox] = loop._inboxes.values()
    inbox.until -= HANGS_AFTER_S
    inbox.queued_until -= HANGS_AFTER_S
    return waiting


@pytest.mark.parametrize(
    "options", [{"first_token_within_s": HANGS_AFTER_S}, {"background": True}, {"generated": (97, 97)}], ids=str
)
async def test_who_waits_for_a_slot_does_not_stand_still(
    full: tuple[EngineLoop, Gated], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    loop, executor = full
    monkeypatch.setattr(loop, "stepping_s", lambda: 0.0)
    waiting = await overdue(loop, executor, generation("waits", max_tokens=4, **options))
    await looked_after(loop, monkeypatch, times=3)
    assert not waiting.done()
    executor.permit(1000)
    assert (await waiting).finish == "length"


async def test_who_has_no_deadline_is_sent_elsewhere_as_by_any_busy_replica(
    full: tuple[EngineLoop, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full[0], "stepping_s", lambda: 0.0)
    with pytest.raises(QueueFullError, match="no slot was free for"):
        await (await overdue(*full, generation("waits")))


async def test_a_prompt_that_is_computed_in_chunks_does_not_stand_still(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Gated(permits=0)
    loop = start(executor, wait_s=0.02)
    computed = count(1)
    monkeypatch.setattr(loop._engine, "progress", lambda _id: next(computed))
    monkeypatch.setattr(loop, "stepping_s", lambda: 0.0)
    waiting = asyncio.create_task(answer(loop, generation()))
    await looked_after(loop, monkeypatch, times=3)
    assert not waiting.done()
    monkeypatch.setattr(loop._engine, "progress", lambda _id: 7)
    with pytest.raises(StandstillError):
        await waiting


async def test_a_step_that_hangs_is_no_life(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.deployments.llm.loop._SIGN_S", 0.01)
    loop = start(Gated(permits=0), wait_s=0.2)
    first = asyncio.create_task(answer(loop, generation("a")))
    await until(lambda: loop.stepping_s() > 0.01)
    with pytest.raises(StandstillError):
        await anext(loop.generate(generation("b")))
    with pytest.raises(StandstillError):
        await first


async def test_closing_the_loop_ends_the_thread_and_the_requests(start: Start) -> None:
    executor = Gated(permits=1)
    loop = start(executor)
    task = asyncio.create_task(answer(loop, generation(max_tokens=50)))
    await until(lambda: loop.report()["tokens"] == 1)
    executor.permit(1)
    threading.Timer(0.02, executor.permit, (5,)).start()
    loop.close()
    with pytest.raises(BrokenError, match="the engine was closed"):
        await task
    with pytest.raises(BrokenError):
        await answer(loop, generation())
    assert not loop._thread.is_alive()


def test_merging_pieces_loses_nothing() -> None:
    pieces: Iterator[Piece] = iter([Piece((1,), "a"), Piece((2, 3), ""), Piece((4,), "b", None, "stop")])
    assert merged(list(pieces)) == Piece((1, 2, 3, 4), "ab", None, "stop")


async def test_a_replica_shows_that_it_lives_while_a_grammar_is_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pliant.deployments.llm.loop._SIGN_S", 0.01)
    read, loop = threading.Event(), start(Gated())
    monkeypatch.setattr(loop._engine, "guide", lambda _generation: not read.wait(HANGS_AFTER_S) or None)
    pieces = loop.generate(generation(grammar="slow"))
    assert [await anext(pieces) for _ in range(2)] == [None, None]
    read.set()
    assert merged([piece async for piece in pieces if piece])
