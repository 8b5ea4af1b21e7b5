"""What the benchmark of starts promises: when services answered, what processes are, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from e2e.cluster import runs
from PIL import Image
from support.waiting import wait_until

from pliant.bench.load import LoadError
from pliant.bench.ray_session import Running, running
from pliant.bench.start import background, plots, processes
from pliant.bench.start.background import CALM_S, Calm
from pliant.bench.start.figures import Round, Start, figures
from pliant.bench.start.questions import Question, questions
from pliant.bench.start.timeline import Advance, Timeline, watch
from pliant.deployments.kinds import read

ROOT = Path(__file__).parents[2]
PYTHON = "/home/me/.venv/bin/python3.11"
RAY = "/home/me/.venv/lib/python3.11/site-packages/ray"
SLEEPS = [sys.executable, "-c", "import time; print('about to sleep', flush=True); time.sleep(600)"]


def start(ready: float, memory_gb: float = 1.0, **answered: float) -> Start:
    return Start(Timeline(answered, ready), 1.0, {"gateway": memory_gb / 4, "Ray daemons": memory_gb * 3 / 4})


ROUNDS = [
    Round(start(10, constant=10.0), start(100, 2.0, a=20.0, b=100.0), start(30, 2.5, a=15.0, b=25.0)),
    Round(start(8, constant=8.0), start(120, 3.0, a=120.0, b=40.0), start(24, 2.5, a=16.0, b=24.0)),
    Round(start(20, constant=20.0), start(180, 2.2, a=30.0, b=90.0), start(40, 2.5, a=40.0, b=20.0)),
]


@pytest.mark.parametrize(
    ("name", "value", "low", "high"),
    [
        ("first_answer_vs_bare_serve", 2.0, 1.5, 5.0),
        ("all_ready_vs_bare_serve_first", 10.0, 9.0, 15.0),
        ("all_ready_vs_bare_serve_second", 3.0, 2.0, 3.0),
        ("memory_pss_gb", 2.2, 2.0, 3.0),
        ("a_vs_bare_serve_first", 2.0, 1.5, 15.0),
        ("b_vs_bare_serve_second", 2.5, 1.0, 3.0),
    ],
)
def test_figures_pair_each_start_with_the_bare_one_of_its_round(
    name: str, value: float, low: float, high: float
) -> None:
    figure = next(figure for figure in figures(ROUNDS) if figure.name == name)
    assert (figure.value, figure.low, figure.high) == pytest.approx((value, low, high))


def test_every_service_is_plotted() -> None:
    (axes,) = plots.ready(ROUNDS).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all, and ready", "b", "a"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::ServeReplica:pliant:gateway", "gateway"),
        ("ray::ServeReplica:pliant:planner.exchange", "planner"),
        ("ray::ServeReplica:pliant:gateway-texts", "replicas of gateway-texts"),
        ("ray::ServeReplica:pliant:topics-small", "replicas of topics-small"),
        ("ray::ServeReplica:pliant:topics.handle_request", "replicas of topics"),
        ("ray::SERVE_REPLICA::pliant#chat#zzeq669k:ServeReplica:pliant:chat.__init__", "replicas of chat"),
        ("ray::ServeController.listen_for_change", "Serve controller and proxy"),
        ("ray::ProxyActor", "Serve controller and proxy"),
        ("ray::IDLE", "idle workers"),
        ("ray::DashboardAgent", "Ray daemons"),
        ("ray::RuntimeEnvAgent", "Ray daemons"),
        (f"{RAY}/core/src/ray/gcs/gcs_server --log_dir=/tmp/pliantx/ray", "Ray daemons"),
        (f"{RAY}/core/src/ray/raylet/raylet --python_worker_command={PYTHON} {RAY}/x.py", "Ray daemons"),
        (f"{PYTHON} -u {RAY}/autoscaler/_private/monitor.py --logs-dir=/tmp/pliantx/ray", "Ray daemons"),
        (f"{PYTHON} -B -c from multiprocessing.resource_tracker import main;main(25)", "Ray daemons"),
        (f"{PYTHON} /home/me/.venv/bin/pliant serve /tmp/pliantx/cluster.yaml", "command"),
        (f"{PYTHON} -m pliant.deployments.run /tmp/pliantx/cluster.yaml", "command"),
        (f"{PYTHON} /home/me/.venv/bin/serve run /tmp/pliantx/cluster.yaml", "command"),
        (f"{PYTHON} -m pliant.kernels.vision.compiler /tmp/pliantx/zoo/digits-vit --gamma=4", processes.COMPILERS),
        ("/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus -quiet a.cpp", processes.COMPILERS),
        ("g++ a.cpp -o a.so", processes.COMPILERS),
        ("ray::_prepare", "other"),
    ],
)
def test_processes_are_told_apart_by_their_command_lines(command: str, kind: str) -> None:
    assert processes.kind(command) == kind


def test_memory_is_added_up_by_kind(tmp_path: Path) -> None:
    holds = "import time; held = b'x' * 50_000_000; print(1, flush=True); time.sleep(600)"
    with running([sys.executable, "-c", holds], tmp_path, {}) as started:
        while not started.log.read_text():
            assert started.process.poll() is None
        (holding,) = started.family()
        assert 0.05 < processes.memory([holding])["other"] < 0.08
        assert 0.10 < processes.memory([holding, holding])["other"] < 0.16
    assert processes.memory([holding]) == {}, "it has ended"


def test_processor_seconds_include_children_that_have_ended(tmp_path: Path) -> None:
    works = "import time\nwhile time.process_time() < 0.5: pass"
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {works!r}]); print(1, flush=True); "
    with running([sys.executable, "-c", parent + "time.sleep(600)"], tmp_path, {}) as started:
        while not started.log.read_text():
            assert started.process.poll() is None
        assert 0.5 <= processes.processor_seconds(started.family()) < 5


def test_a_cluster_is_calm_once_nothing_has_changed_or_compiled_for_some_time() -> None:
    calm = Calm()
    assert not calm.reached(0, {"a 1": "eager"}, working=True)
    assert not calm.reached(CALM_S, {"a 1": "eager"}, working=True)
    assert not calm.reached(CALM_S + 1, {"a 1": "aoti"}, working=False), "the backend has changed"
    assert not calm.reached(2 * CALM_S, {"a 1": "aoti"}, working=False)
    assert calm.reached(2 * CALM_S + 1, {"a 1": "aoti"}, working=False)


@pytest.mark.parametrize(
    ("compiling", "expected"), [({}, False), ({"compiling": []}, False), ({"compiling": [64]}, True)]
)
def test_what_replicas_compute_on_and_compile_is_what_stats_tells(compiling: dict[str, Any], expected: bool) -> None:
    topics = {"1": {"backend": "eager", **compiling}, "2": {"backend": "aoti"}}
    stats = {
        "services": {
            "topics": {"plan": {}, "replicas": topics},
            "digits": {"replicas": {"1": {"backend": "eager"}}, "tasks": []},
            "chat": {"replicas": {"1": {"live": 0}}},
            "topics-c": {"replicas": {}},
        }
    }
    assert background.backends(stats) == {"topics 1": "eager", "topics 2": "aoti", "digits 1": "eager"}
    assert background.compiles(stats) == expected


def test_a_start_that_makes_no_progress_is_given_up() -> None:
    advance = Advance()
    assert advance.problem(0, 1) is None
    assert advance.problem(500, 2) is None
    assert advance.problem(1100, 2) is None
    assert advance.problem(1101, 2) == "it made no progress for 600 s"
    assert advance.problem(3601, 3) == "it took more than 3600 s"


def test_every_service_of_the_default_cluster_is_asked() -> None:
    serving = read(ROOT / "cluster.yaml").serving
    asked = questions(serving)
    assert list(asked) == list(serving.services)
    assert {name: question.path for name, question in asked.items()} == {
        "topics": "/models/topics",
        "topics-small": "/models/topics-small",
        "topics-c": "/models/topics-c",
        "search": "/v1/embeddings",
        "chat": "/v1/completions",
        "library": "/models/library",
        "ask": "/v1/chat/completions",
        "digits": "/models/digits",
    }
    image = json.loads(asked["digits"].body or b"")["inputs"]
    assert Image.open(io.BytesIO(base64.b64decode(image))).size == (8, 8)


class Starting:
    """A cluster whose services begin to answer after some requests each; `asked` counts them."""

    def __init__(self, refusals: Mapping[str, int]) -> None:
        self._refusals = refusals
        self.asked = dict.fromkeys(refusals, 0)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        ready = self.asked[request.path] > self._refusals[request.path]
        return web.Response(status=200 if ready else 503)

    async def watched(self, started: Running, cache: Path) -> Timeline:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with TestServer(app) as server:
            asked = {path[1:]: Question(path, b"{}") for path in self._refusals if path != "/ready"}
            return await watch(started, str(server.make_url("")).rstrip("/"), asked, Question("/ready"), cache)


async def test_services_are_asked_until_they_answer_and_then_the_cluster(tmp_path: Path) -> None:
    cluster = Starting({"/late": 2, "/early": 0, "/ready": 1})
    with running(SLEEPS, tmp_path, {}) as started:
        timeline = await cluster.watched(started, tmp_path)
    assert cluster.asked == {"/late": 3, "/early": 1, "/ready": 2}
    assert list(timeline.answered) == ["late", "early"]
    assert timeline.first == timeline.answered["early"] < timeline.answered["late"] < timeline.ready


async def test_a_start_whose_process_ends_fails_with_its_log(tmp_path: Path) -> None:
    dies = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with running(dies, tmp_path, {}) as started:
        await asyncio.to_thread(started.process.wait)
        with pytest.raises(LoadError, match=r"(?s)exit status 1; nothing had answered.*no such model"):
            await Starting({"/early": 0, "/never": 1_000_000, "/ready": 0}).watched(started, tmp_path)


def test_nothing_is_left_of_a_command_that_was_ended(tmp_path: Path) -> None:
    """Neither children that do not listen to signals, nor those that have lost their parents."""
    stubborn = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
    stubborn += "time.sleep(600)"
    adopted = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}, {str(tmp_path)!r}])"
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {adopted!r}]); "
    parent += f"subprocess.run([sys.executable, '-c', {stubborn!r}])"
    with running([sys.executable, "-c", parent], tmp_path, {}) as started:
        while started.log.read_text().split() != ["1", "1"]:
            assert started.process.poll() is None
        children = [
            process for process in psutil.process_iter(["cmdline"]) if stubborn in (process.info["cmdline"] or ())
        ]
        assert len(children) == 2
    assert not any(child.is_running() for child in children)


def test_a_command_stops_with_whoever_started_it(tmp_path: Path) -> None:
    """And is killed, as by a limit of time."""
    starts = f"""
import time
from pathlib import Path
from pliant.bench.ray_session import running

with running([{sys.executable!r}, "-c", "import time; time.sleep(600)"], Path({str(tmp_path)!r}), {{}}) as started:
    print(started.process.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: not runs(child))
