"""Whether anything is left of what clients did: memory, descriptors, threads and label sets of each process over time.

A cluster of a text classifier, a language model with adapters and a vision transformer with tasks is asked without
pause by clients that never do the same twice. What it has once memory has warmed up is extrapolated to an hour, with
bounds: where zero lies between them, the run was too short to say that anything grows, or that nothing does.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.progress import Progress

from pliant import zoo
from pliant.bench.load import LoadError
from pliant.bench.ray_session import Running, free_port, running, script
from pliant.bench.report import Figure, Options, Report
from pliant.bench.soak.clients import CHATS, IMAGES, TEXTS, Clients
from pliant.bench.soak.watch import OF_OURS, OURS, WHOLE, Growth, Sample, growth, look, warmed_up

_CLUSTER = Path(__file__).resolve().parents[2] / "cluster.yaml"
_READY_WITHIN_S = 1800.0
_CHAT_MEMORY_MB = 64
"""What clients ask for fills it within minutes: until then prefixes that are kept take more and more of it."""


@dataclass(frozen=True)
class _Plan:
    minutes: float
    every_s: float = 5.0
    seed: int = 0


_QUICK = _Plan(minutes=4)
_FULL = _Plan(minutes=30)


def run(options: Options) -> Report:
    """Raises LoadError if the cluster does not get ready."""
    plan = _QUICK if options.quick else _FULL
    with (
        tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as folder,
        _cluster(Path(folder)) as (started, address),
    ):
        clients = Clients(address, plan.seed)
        samples = asyncio.run(_soak(plan, clients, started, address))
    return _report(plan, samples, clients)


async def _soak(plan: _Plan, clients: Clients, started: Running, address: str) -> list[Sample]:
    asking = asyncio.create_task(clients.run())
    samples = []
    with Progress(transient=True) as progress:
        task = progress.add_task("soak", total=plan.minutes * 60)
        ends = time.monotonic() + plan.minutes * 60
        while (left := ends - time.monotonic()) > 0:
            progress.update(task, completed=plan.minutes * 60 - left)
            await asyncio.sleep(plan.every_s)
            samples.append(await asyncio.to_thread(look, started, address))
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    return samples


def _report(plan: _Plan, samples: list[Sample], clients: Clients) -> Report:
    warm = samples[warmed_up([sample.private_mb[WHOLE] for sample in samples]) :]
    memory = [sample.private_mb for sample in warm]
    processes = {name: _percent(warm, memory, name) for name in memory[-1]}
    worst = max((name for name in processes if name.startswith(OF_OURS)), key=lambda name: processes[name].an_hour)
    hourly = {
        what: {name: growth(warm, [getattr(sample, what) for sample in warm], name) for name in names}
        for what, names in ((each, getattr(warm[-1], each)) for each in Sample._fields[1:])
    }
    config = {
        **asdict(plan),
        "warm_up_s": round(warm[0].at_s - samples[0].at_s),
        "sent": dict(clients.statuses),
        "first": warm[0]._asdict(),
        "last": warm[-1]._asdict(),
        "growth_an_hour": {
            what: {name: [round(value, 2) for value in each] for name, each in names.items()}
            for what, names in hourly.items()
        },
    }
    figures = [
        Figure("memory_growth_percent_an_hour", *processes[WHOLE], "<= 1"),
        Figure("memory_growth_percent_an_hour_without_ray", *processes[OURS], "<= 1", f"the most: {worst}"),
        Figure("descriptors_growth_an_hour", *hourly["descriptors"][WHOLE], "0"),
        Figure("threads_growth_an_hour", *hourly["threads"][WHOLE], "0"),
        _count("label_sets_growth", sum(_difference(samples, name) for name in warm[-1].series)),
        _count("server_errors", sum(number for status, number in clients.statuses.items() if status[0] == "5")),
    ]
    return Report(figures, config, {})


def _percent(samples: list[Sample], memory: list[Any], name: str) -> Growth:
    mean = statistics.mean(float(each.get(name, 0.0)) for each in memory)
    return Growth(*(100 * bound / mean for bound in growth(samples, memory, name)))


def _difference(samples: list[Sample], name: str) -> float:
    """Of label sets, over the second half."""
    return samples[-1].series[name] - samples[len(samples) // 2].series[name]


def _count(name: str, value: float) -> Figure:
    return Figure(name, value, value, value, "0")


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[Running, str]]:
    """One that is ready, and its address."""
    for name in (zoo.ADAPTERS, zoo.TASKS):
        shutil.copytree(zoo.ensure(name, lambda _what, _done: None), folder / name)
    (folder / "state").mkdir()
    port = free_port()
    content = yaml.safe_load(_CLUSTER.read_text())
    content["http_options"]["port"] = port
    args = content["applications"][0]["args"]
    services = args["services"] = {name: args["services"][name] for name in (TEXTS, CHATS, IMAGES)}
    for service in services.values():
        service["replicas"] = 1
    services[TEXTS]["lengths"] = [64]
    services[CHATS]["memory_mb"] = _CHAT_MEMORY_MB
    services[CHATS]["adapters"] = {"roots": [str(folder / zoo.ADAPTERS)]}
    services[IMAGES]["tasks"] = {"folder": services[IMAGES]["tasks"], "roots": [str(folder / zoo.TASKS)]}
    args["state"] = str(folder / "state")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(content))
    address = f"http://127.0.0.1:{port}"
    with running([script("pliant"), "serve", str(folder / "cluster.yaml")], folder, {}) as started:
        _await_ready(started, address)
        yield started, address


def _await_ready(started: Running, address: str) -> None:
    """Until all services answer, and nothing is compiled any more."""
    while started.seconds() < _READY_WITHIN_S and started.process.poll() is None:
        with suppress(httpx.HTTPError, ValueError, KeyError):  # HAProxy answers before there is a gateway
            views = httpx.get(f"{address}/stats", timeout=60).json()["services"].values()
            reports = [report for view in views for report in view["replicas"].values()]
            if all(view["ready"] for view in views) and not any(report.get("compiling") for report in reports):
                return
        time.sleep(1)
    raise LoadError(f"the cluster did not get ready:\n{started.tail()}")
