"""So many heavy jobs run at a time on a machine, the most urgent first, and a process that dies is no obstacle."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from pliant import turns
from pliant.turns import Queue

turn = partial(turns.turn, queue=Queue("background", 1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setattr(turns, "_POLL_S", 0.005)
    return tmp_path


class Jobs:
    """Threads that each wait for a turn, and what they did."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.heard: list[str] = []
        self._at_once = 0
        self._threads: list[threading.Thread] = []

    def start(self, name: str, *urgency: float) -> None:
        self._threads.append(threading.Thread(target=self._run, args=(name, urgency)))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self, name: str, urgency: tuple[float, ...]) -> None:
        with turn(name, lambda: urgency, lambda text, _done: self.heard.append(text)):
            self._at_once += 1
            assert self._at_once == 1
            self.done.append(name)
            self._at_once -= 1


def waiting(cache: Path) -> int:
    return len(list((cache / "turns" / "background").glob("*.ticket")))


def until(cache: Path, number: int) -> None:
    while waiting(cache) != number:
        pass


def test_the_most_urgent_is_next_and_of_two_the_older(cache: Path) -> None:
    jobs = Jobs()
    with turn("first", lambda: (0.0,)):
        for index, (name, urgency) in enumerate(
            (("late", (1.0, 0.0)), ("a", (0.0, 5.0)), ("b", (0.0, 5.0)), ("c", (0.0, 1.0)))
        ):
            jobs.start(name, *urgency)
            until(cache, index + 1)
        while "waiting for first" not in jobs.heard:
            pass
    jobs.join()
    assert jobs.done == ["c", "a", "b", "late"]
    assert waiting(cache) == 0


def test_urgency_is_asked_again(cache: Path) -> None:
    jobs, urgency = Jobs(), [5.0]
    done: list[str] = []

    def changeable() -> None:
        with turn("changes", lambda: tuple(urgency)):
            done.append("changes")

    with turn("first", lambda: (0.0,)):
        thread = threading.Thread(target=changeable)
        thread.start()
        until(cache, 1)
        jobs.start("other", 3.0)
        until(cache, 2)
        urgency[0] = 1.0
        while "[1.0]" not in [file.read_text() for file in (cache / "turns" / "background").glob("*.ticket")]:
            pass
    thread.join()
    jobs.join()
    assert (done, jobs.done) == (["changes"], ["other"])


@pytest.mark.parametrize("where", ["runs", "waits"])
def test_whoever_dies_leaves_the_queue(cache: Path, where: str) -> None:
    script = (
        "import sys; from pliant.turns import Queue, turn\n"
        "heard = lambda text, done: print('waits', flush=True)\n"
        "with turn('theirs', lambda: (-1.0,), heard, Queue('background', 1)):\n"
        "    print('runs', flush=True); sys.stdin.read()"
    )
    ours = turn("ours", lambda: (0.0,))
    if where == "waits":
        ours.__enter__()
    theirs = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert theirs.stdout
    assert theirs.stdout.readline() == f"{where}\n"
    theirs.kill()
    theirs.communicate()
    if where == "waits":
        ours.__exit__(None, None, None)
    with turn("next", lambda: (0.0,)):
        pass
    assert waiting(cache) == 0


def test_an_interrupted_wait_leaves_the_queue(cache: Path) -> None:
    class EnoughError(Exception):
        pass

    def enough(_text: str, _done: float) -> None:
        raise EnoughError

    with turn("first", lambda: (0.0,)):
        with pytest.raises(EnoughError), turn("impatient", lambda: (0.0,), enough):
            pass
        assert waiting(cache) == 0
    with turn("next", lambda: (0.0,)):
        pass


def test_several_may_run_at_a_time(cache: Path) -> None:
    queue = Queue("loading", 2)
    entered = [turn(str(number), lambda: (0.0,), queue=queue) for number in range(2)]
    for each in entered:
        each.__enter__()
    third = threading.Thread(target=lambda: turn("third", lambda: (0.0,), queue=queue).__enter__())
    third.start()
    while not list((cache / "turns" / "loading").glob("*.ticket")):
        pass
    with turn("another queue", lambda: (0.0,)):
        pass
    entered[1].__exit__(None, None, None)
    third.join()
    entered[0].__exit__(None, None, None)


def test_it_may_be_left_in_another_thread() -> None:
    entered = turn("here", lambda: (0.0,))
    thread = threading.Thread(target=entered.__enter__)
    thread.start()
    thread.join()
    entered.__exit__(None, None, None)
    with turn("next", lambda: (0.0,)):
        pass
