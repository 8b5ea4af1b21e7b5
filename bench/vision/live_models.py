"""The services that live systems take turns with: the zoo's digits, or the real tasks."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pliant.bench.report import Options
from pliant.bench.vision import real_tasks
from pliant.bench.vision.live_service import Repeated, Service
from pliant.config.vision import VisionConfig
from pliant.deployments.vision import assembly
from pliant.deployments.vision.device import ExecutorDevice
from pliant.deployments.vision.tasks import Tasks
from pliant.formats.vision_task import read_task
from pliant.models import sources
from pliant.training.vision import Examples
from pliant.zoo import digits


async def open_service(options: Options) -> Service:
    """The real tasks, or the zoo's digits without their data; trained, compiled and profiled if they never were.

    Raises PliantError.
    """
    config, folders, held_out = _digits() if options.data is None else _real(options.data)
    loaded = assembly.load(config)
    executor = Repeated(loaded.executor)
    device = ExecutorDevice(executor, ThreadPoolExecutor(1), loaded.gammas, loaded.identity)
    tasks = Tasks(device, measure=device.measure)
    refs = {name: read_task(folder, executor.info).ref for name, folder in folders.items()}
    for ref in refs.values():
        await tasks.acquire(ref)
    await tasks.measured()
    return Service(
        device,
        tasks,
        refs,
        held_out,
        loaded.gammas,
        lambda gamma, rows: executor.times * loaded.latency(gamma, rows),
        executor.most_rows,
        f"{Path(config.model).name}, {executor.backend}, each batch computed {executor.times} times",
    )


_Parts = tuple[VisionConfig, Mapping[str, Path], Mapping[str, Examples]]


def _digits() -> _Parts:
    unseen = digits.held_out()
    held_out = {name: Examples(unseen.images, task.label(unseen.labels)) for name, task in digits.TASKS.items()}
    tasks = "zoo/digits-tasks"
    folder = sources.fetch_tasks(tasks)
    config = VisionConfig(kind="vision", model="zoo/digits-vit", tasks={"folder": tasks}, compile=True)  # type: ignore[arg-type]
    return config, {name: folder / name for name in held_out}, held_out


def _real(data: Path) -> _Parts:
    real = real_tasks.prepared(data)
    return real_tasks.service(real), real.tasks, real.held_out
