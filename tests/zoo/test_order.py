"""What a user lacks of the zoo is trained the cheapest first, and what takes long not before one model can answer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.waiting import wait_until

from pliant import turns, zoo
from pliant.cache import cache_folder
from pliant.turns import Queue
from pliant.zoo.shapes import Progress

SHORT, LONGER, LONG = "topics-small", "digits-vit", "tiny-llama"


class Trainings:
    """Each begins when it is its turn and ends when it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end: dict[str, threading.Event] = {}

    def train(self, name: str, _into: Path, _progress: Progress, _niceness: int) -> None:
        self.begun.append(name)
        self._may_end.setdefault(name, threading.Event()).wait()

    def end(self, name: str) -> None:
        self._may_end.setdefault(name, threading.Event()).set()


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setattr(turns, "_POLL_S", 0.005)
    monkeypatch.setattr(zoo, "_POLL_S", 0.005)
    monkeypatch.setattr(zoo, "BACKGROUND", Queue("background", 1))
    monkeypatch.setattr(zoo, "LONG", Queue("long", 1))
    found = Trainings()
    monkeypatch.setattr(zoo, "train_apart", found.train)
    return found


def test_the_cheapest_first_and_the_long_beside_the_second(trainings: Trainings) -> None:
    zoo.train_ahead([LONG, LONGER, SHORT])
    wait_until(lambda: bool(trainings.begun))
    waits: list[str] = []
    asking = threading.Thread(target=zoo.ensure, args=(LONG, lambda text, _done: waits.append(text)))
    asking.start()
    wait_until(lambda: bool(waits))
    assert trainings.begun == [SHORT]
    assert set(waits) == {"waiting for the first model that can answer"}
    trainings.end(SHORT)
    wait_until(lambda: len(trainings.begun) == 3)
    assert set(trainings.begun[1:]) == {LONGER, LONG}
    trainings.end(LONGER)
    trainings.end(LONG)
    asking.join()


def test_nothing_less_urgent_comes_between_two_trainings(trainings: Trainings) -> None:
    """What compiles waits while the first is trained; the second waits already when that ends."""
    zoo.train_ahead([LONGER, SHORT])
    wait_until(lambda: trainings.begun == [SHORT])

    def compile_something() -> None:
        with turns.turn("compiling", lambda: (turns.COMPILE,), queue=zoo.BACKGROUND):
            trainings.begun.append("compiled")

    compiling = threading.Thread(target=compile_something)
    compiling.start()
    wait_until(lambda: len(list((cache_folder() / "turns" / "background").glob("*.ticket"))) == 2)
    trainings.end(SHORT)
    trainings.end(LONGER)
    compiling.join()
    assert trainings.begun == [SHORT, LONGER, "compiled"]


def test_alone_it_waits_for_nothing(trainings: Trainings) -> None:
    trainings.end(LONG)
    zoo.train_ahead([LONG])
    assert zoo.ensure(LONG, lambda *_: None) == zoo.folder(LONG)
    assert trainings.begun == [LONG]


def test_where_a_model_is_there_it_does_not_wait(trainings: Trainings) -> None:
    trainings.end(SHORT)
    zoo.ensure(SHORT, lambda *_: None)
    zoo.train_ahead([LONGER])
    wait_until(lambda: trainings.begun == [SHORT, LONGER])
    trainings.end(LONG)
    zoo.ensure(LONG, lambda *_: None)
    trainings.end(LONGER)
    wait_until(zoo.folder(LONGER).exists)


def test_a_training_that_fails_does_not_hold_up_the_others(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str, into: Path, progress: Progress, niceness: int) -> None:
        trainings.begun.append(name)
        raise OSError("no space left")

    monkeypatch.setattr(zoo, "train_apart", train)
    zoo.train_ahead([LONG, LONGER, SHORT])
    wait_until(lambda: set(trainings.begun) == {SHORT, LONGER, LONG})


def test_a_queue_is_busy_while_a_job_of_it_runs(trainings: Trainings) -> None:
    queue = Queue("background", 2)
    assert not turns.busy(queue)
    with turns.turn("a job", lambda: (0.0,), queue=queue):
        assert turns.busy(queue)
    assert not turns.busy(queue)
