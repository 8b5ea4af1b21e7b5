"""The commands for vision services: train a task, register it, and profile a service."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import httpx
import typer
from rich.table import Table

from pliant.cli.terminal import console, progress
from pliant.cli.vision_profile import VisionProfile
from pliant.config.vision import VisionConfig
from pliant.errors import ConfigError, PliantError
from pliant.formats.vision_task import MOST_PROMPTS, USUAL_PROMPTS, TaskError, TaskRef, check_description, read_task
from pliant.models import sources
from pliant.models.vision_info import VisionInfo, merging_gammas

_MEGAPIXELS = 80
_LOAD_S = 60


def train_prompts(
    model: Annotated[str, typer.Argument(help="A vision transformer of timm's: a name, or a folder.")],
    data: Annotated[Path, typer.Argument(help="A folder with a folder of images per label, or .npz: images, labels.")],
    out: Annotated[Path, typer.Argument(help="Becomes the task's folder.")],
    *,
    name: Annotated[str, typer.Option(help="What requests call the task.")],
    labels: Annotated[str, typer.Option(help="In which order, with commas; by default that of the alphabet.")] = "",
    gammas: Annotated[str, typer.Option(help="With commas; above 0: prompts a layer, below: merged tokens.")] = "auto",
    slo_ms: Annotated[float, typer.Option(help="How soon an answer is wanted, unless a request says otherwise.")] = 600,
    utility: Annotated[float, typer.Option(help="What a right one in time is worth, unless a request says so.")] = 1.0,
    epochs: Annotated[int, typer.Option(min=1, help="Over the images, for each number of prompts.")] = 50,
    batch: Annotated[int, typer.Option(min=1, help="Images in a step.")] = 32,
    lr: Annotated[float, typer.Option(min=1e-9, help="Learning rate at its peak.")] = 0.002,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to compute.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of random numbers.")] = 0,
) -> None:
    """Train a task's head and prompts on a frozen model, and measure how accurate it is with each gamma.

    A fifth of the images is set aside to measure by, and kept in the task's folder.
    """
    chosen = tuple(filter(None, map(str.strip, labels.split(","))))
    check_description(name, chosen or ("no", "yes"), slo_ms, utility)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError([f"{out}: is there already; choose a folder that is not"])

    import torch
    from safetensors import SafetensorError

    from pliant.deployments.http.images import ImageReader
    from pliant.kernels.vision.model import load_model
    from pliant.kernels.vision.vit import TokenAdaptiveViT
    from pliant.training.vision import Recipe, Task, Trainer
    from pliant.training.vision_data import read_labelled, split

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["--device: got cuda, but there is no GPU that torch can use; choose cpu"])
    with progress() as update:
        info, backbone = load_model(sources.fetch_vision(model, progress=update), "float32", device)
        learned = _gammas(gammas, info)
        found = read_labelled(data, chosen, ImageReader(info, _MEGAPIXELS), lambda done: update("reading images", done))
        check_description(name, found.labels, slo_ms, utility)
        training, profiling = split(found.examples, seed)
        recipe = Recipe(batch, epochs, lr, seed)
        trainer = Trainer(TokenAdaptiveViT(backbone), info, Recipe(seed=seed), recipe, device)
        task = Task(name, found.labels, slo_ms, utility)
        try:
            out.mkdir(parents=True, exist_ok=True)
            accuracies = trainer.train(task, training, profiling, learned, out, update)
        except OSError as error:
            raise ConfigError([f"{out}: cannot be written: {error.strerror}"]) from None
        except SafetensorError as error:  # which stands for an OSError, too
            raise ConfigError([f"{out}: cannot be written: {error}"]) from None
    table = Table("gamma", f"accuracy on {len(profiling.labels)} images", "points more than at 0")
    for gamma, accuracy in accuracies.items():
        table.add_row(f"{gamma:+d}" if gamma else "0", f"{accuracy:.1%}", f"{100 * (accuracy - accuracies[0]):+.1f}")
    console.print(table)
    console.print(f"Written to {out}. Serve it: pliant register-task URL SERVICE {name} {out.resolve()}", markup=False)


def register_task(
    url: Annotated[str, typer.Argument(help="The cluster's address, such as http://127.0.0.1:8000.")],
    service: Annotated[str, typer.Argument(help="A vision service.")],
    name: Annotated[str, typer.Argument(help="What requests are to call the task.")],
    path: Annotated[str, typer.Argument(help="Its folder as replicas see it: whole, or from one of the roots on.")],
    *,
    replace: Annotated[bool, typer.Option("--replace", help="May take the place of one of that name.")] = False,
    api_key: Annotated[str, typer.Option(envvar="PLIANT_API_KEY", help="If the cluster wants one.")] = "",
) -> None:
    """Have a running cluster serve a task, on all replicas and without a restart."""
    address = f"{url.rstrip('/')}/v2/repository/models/{quote(service, safe='')}/tasks/{quote(name, safe='')}/load"
    body = {"parameters": {"path": path, "replace": replace}}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.post(address, json=body, headers=headers, timeout=_LOAD_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PliantError(f"{url}: cannot be reached: {error or type(error).__name__}") from None
    said = _said(answer)
    if answer.status_code != 200:
        raise PliantError(f"{url}: refused with {answer.status_code}: {said.get('error') or answer.reason_phrase}")
    if not said:
        raise PliantError(f"{url}: is no cluster of pliant: what it answered is no JSON object")
    console.print(f"{service} serves {name} now:", markup=False)
    for key, value in said.items():
        console.print(f"  {key}: {', '.join(map(str, value)) if isinstance(value, list) else value}", markup=False)


def profile_vision(name: str, service: VisionConfig, out: Path) -> None:
    """Measure latency, memory and accuracy of each gamma of `service`, and show them."""
    with progress() as update:
        sources.fetch_vision(service.model, progress=update)
        if service.tasks.folder:
            sources.fetch_tasks(service.tasks.folder, update)
        found = _measured(name, service, update)
    console.print(found.table())
    if found.useless:
        console.print(found.summary())
    out.mkdir(parents=True, exist_ok=True)
    found.write(out / f"profile-{name}.json")
    found.plot(out / f"profile-{name}.png")
    console.print(f"Written to {out / f'profile-{name}'}.json and .png.")


def _measured(name: str, service: VisionConfig, update: sources.Progress) -> VisionProfile:
    import numpy as np

    from pliant.deployments.vision.assembly import load
    from pliant.deployments.vision.device import ExecutorDevice
    from pliant.policies.vision.token_profile import dominated

    loaded = load(service, update)
    accuracies = {} if service.tasks.folder else {"model, assumed": dict(loaded.own)}
    with ThreadPoolExecutor(1) as worker:
        device = ExecutorDevice(loaded.executor, worker, loaded.gammas, loaded.identity, loaded.own)

        async def accuracies_of(task: TaskRef) -> dict[int, float]:
            said = await device.load(task)
            return dict(await device.measure(task) or said)

        folders = sources.task_folders(service.tasks.folder) if service.tasks.folder else []
        for index, folder in enumerate(folders):
            update(f"measuring accuracies of {folder.name}", index / len(folders))
            try:
                task = read_task(folder, loaded.executor.info)
                accuracies[task.name] = asyncio.run(accuracies_of(task.ref))
            except TaskError as error:
                console.print(str(error), style="yellow", markup=False)
    every, shown = range(1, loaded.executor.most_rows + 1), loaded.measured
    latency_s = np.array([[loaded.latency(gamma, rows) for rows in every] for gamma in loaded.gammas])
    known = [[each.get(gamma, math.nan) for gamma in loaded.gammas] for each in accuracies.values()]
    return VisionProfile(
        name=name,
        model=service.model,
        device=f"{service.device}, {service.dtype}, {service.threads} CPU thread(s), {loaded.executor.backend}",
        gammas=loaded.gammas,
        batches=shown,
        seconds=tuple(tuple(loaded.latency(gamma, rows) for rows in shown) for gamma in loaded.gammas),
        memory_bytes=tuple(tuple(loaded.memory_bytes(gamma, rows) for rows in shown) for gamma in loaded.gammas),
        accuracies=accuracies,
        useless=dominated(loaded.gammas, latency_s, np.array(known)),
    )


def _gammas(given: str, info: VisionInfo) -> tuple[int, ...]:
    if given == "auto":
        return (*merging_gammas(info), 0, *USUAL_PROMPTS)
    try:
        gammas = tuple(sorted({0, *map(int, given.split(","))}))
    except ValueError:
        raise ConfigError([f"--gammas: got {given!r}; must be auto, or numbers such as -10,-5,2,4,8"]) from None
    least = -(info.patches // 2)
    if gammas[0] < least or gammas[-1] > MOST_PROMPTS:
        raise ConfigError([f"--gammas: got {given!r}; those of this model go from {least} to {MOST_PROMPTS}"])
    return gammas


def _said(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer, if it is one."""
    try:
        said = answer.json()
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
