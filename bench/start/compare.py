"""How soon a new user gets answers, against the least that Ray Serve can start, on this machine.

The repository's cluster.yaml is started as a user starts it, with an empty cache and again with what that left there,
and beside it an application of Serve's that answers a constant. No Ray runs before any of these starts.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.progress import Progress

from pliant.bench.ray_session import free_port, running, script
from pliant.bench.report import Options, Report
from pliant.bench.start import plots
from pliant.bench.start.background import CALM_S, settle
from pliant.bench.start.figures import Round, Start, figures
from pliant.bench.start.processes import memory, processor_seconds
from pliant.bench.start.questions import Question, questions
from pliant.bench.start.timeline import watch
from pliant.config.cluster import ServingConfig
from pliant.deployments.kinds import read

_CLUSTER = Path(__file__).resolve().parents[2] / "cluster.yaml"
_ROUNDS = 3


@dataclass(frozen=True)
class _Contender:
    """What is started, and how it is asked."""

    command: tuple[str, ...]
    """Takes the path of a Serve config as its last argument."""
    content: Mapping[str, Any]
    """Of that file; its port is replaced by a free one."""
    questions: Mapping[str, Question]
    health: Question
    stats: str | None = None
    """The path of a page that tells what computes in the replicas."""


def run(options: Options) -> Report:
    """Rounds of three starts each; with `quick`, one round. Raises LoadError if a start fails or gets stuck."""
    serving = read(_CLUSTER).serving
    ours, bare = _ours(serving), _bare(serving)
    rounds: list[Round] = []
    count = 1 if options.quick else _ROUNDS
    with Progress(transient=True) as progress:
        task = progress.add_task("start", total=3 * count + 1)

        def start(what: str, contender: _Contender, cache: Path) -> Start:
            progress.update(task, description=what)
            done = asyncio.run(_start(contender, cache))
            progress.advance(task)
            return done

        with _folder() as cache:
            start("bare Serve, not counted: it reads Ray's files from the disk", bare, cache)
        for _ in range(count):
            with _folder() as cache:
                rounds.append(
                    Round(
                        start("bare Serve", bare, cache),
                        start("first start", ours, cache),
                        start("second start", ours, cache),
                    )
                )
    facts = {"cluster": _CLUSTER.name, "calm_s": CALM_S, "rounds": [one.facts() for one in rounds]}
    return Report(figures(rounds), facts, {"ready": plots.ready(rounds)})


def _ours(serving: ServingConfig) -> _Contender:
    """`pliant serve` with the repository's cluster.yaml."""
    content = yaml.safe_load(_CLUSTER.read_text())
    command = (script("pliant"), "serve")
    return _Contender(command, content, questions(serving), Question("/v2/health/ready"), "/stats")


def _bare(serving: ServingConfig) -> _Contender:
    """`serve run` with an application that does nothing, with as many ingress replicas as we have gateways."""
    args = {"replicas": serving.gateway.replicas.min, "cpus": serving.gateway.cpus}
    application = {"name": "bare", "import_path": "pliant.bench.start.bare:build", "route_prefix": "/", "args": args}
    home = Question("/")
    return _Contender((script("serve"), "run"), {"applications": [application]}, {"constant": home}, home)


async def _start(contender: _Contender, cache: Path) -> Start:
    """Start it with this cache, wait until it has nothing left to do, and end it."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    caches = {"XDG_CACHE_HOME": cache, "PLIANT_CACHE": cache / "pliant", "TORCHINDUCTOR_CACHE_DIR": cache / "inductor"}
    with _folder() as folder:
        path = folder / "cluster.yaml"
        path.write_text(yaml.safe_dump({**contender.content, "http_options": {"host": "127.0.0.1", "port": port}}))
        settings = {name: str(value) for name, value in caches.items()}
        with running([*contender.command, str(path)], folder, settings) as started:
            timeline = await watch(started, address, contender.questions, contender.health, cache)
            cpu_s = processor_seconds(started.family())
            await settle(started, contender.stats and address + contender.stats)
            return Start(timeline, cpu_s, memory(started.family()))


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder with a short path, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="pliant"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
