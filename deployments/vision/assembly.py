"""Puts a vision replica together from its configuration: model, profile on this device, policy and engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pliant.cache import cache_folder, made_once
from pliant.config.vision import Algorithm2Config, BatchingConfig, VisionConfig
from pliant.deployments.vision.accuracy import assumed_accuracies
from pliant.deployments.vision.device import Executor, ExecutorDevice
from pliant.deployments.vision.engine import Engine
from pliant.deployments.vision.queue import Waiting
from pliant.deployments.vision.tasks import Tasks
from pliant.deployments.vision.useful_gammas import UsefulGammas
from pliant.errors import ModelError
from pliant.formats.vision_task import USUAL_PROMPTS, TaskError, bytes_of, read_task
from pliant.models import sources
from pliant.models.sources import Progress
from pliant.models.vision_info import VisionInfo, merging_gammas
from pliant.policies.vision.slo_batching import Batching
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import Algorithm2Policy, ExactPolicy, Policy
from pliant.policies.vision.token_profile import TokenProfile

if TYPE_CHECKING:
    from pliant.kernels.vision.executor import VisionExecutor

logger = logging.getLogger("pliant")

MOST_ROWS = 64
"""Images of a batch: the paper's epsilon."""
_BATCHES = (1, 2, 4, 8, 16, 32, MOST_ROWS)
_PROFILE_S = 10.0
"""To measure latencies; longer where a few rounds take longer."""
_FILE = "latency.json"
_RECIPE = 1
"""Raised whenever profiles are measured in another way, so that older ones are left alone."""


class Upgradable(Executor, Protocol):
    """An executor that may go on with what another one has compiled."""

    def take_over(self, other: Any) -> None: ...


class Loaded(NamedTuple):
    """A model that is ready to compute."""

    executor: Upgradable
    gammas: tuple[int, ...]
    latency: Callable[[int, int], float]
    """Seconds for gamma and images."""
    measured: tuple[int, ...]
    """For how many images latency was measured, rising; in between and beyond it is linear."""
    memory_bytes: Callable[[int, int], int]
    """What a run takes beside weights, for gamma and images."""
    identity: str
    """Names model and device."""
    own: Mapping[int, float]
    """Accuracies by gamma, relative to gamma 0's: assumed of the model's own head, and of tasks silent on merging."""


class Assembled:
    """A replica's engine, the tasks that it can have in memory, and the gammas that these need.

    Must be created in a running event loop. `worker` is the one thread in which all is computed.
    """

    def __init__(self, service: str, config: VisionConfig, loaded: Loaded, worker: ThreadPoolExecutor) -> None:
        self._service = service
        self._config = config
        self._executor = loaded.executor
        self._worker = worker
        device = ExecutorDevice(loaded.executor, worker, loaded.gammas, loaded.identity, loaded.own)
        size = partial(bytes_of, backbone=loaded.executor.info)
        self.tasks = Tasks(device, measure=device.measure, size=size)
        self.useful, profile, policy = self._planning(loaded)
        together = batching(config.batching, profile.most_rows)
        self.engine = Engine(device, self.tasks, profile, policy, config.queue, together)
        self.compiling = config.compile and config.device == "cpu" and loaded.executor.backend == "eager"
        """Whether compiled code is to take over, see `compile`."""

    async def compile(self) -> None:
        """Compile and profile the model in the background, unless that has been done, and go on with compiled code."""
        loop = asyncio.get_running_loop()
        try:
            compiled = await asyncio.to_thread(load, self._config)
            await loop.run_in_executor(self._worker, self._executor.take_over, compiled.executor)
            self.useful, profile, policy = self._planning(compiled)
            self.engine.adopt(profile, policy)
        finally:
            self.compiling = False

    def _planning(self, loaded: Loaded) -> tuple[UsefulGammas, TokenProfile, Policy[Waiting]]:
        rows = loaded.executor.most_rows
        useful = UsefulGammas(self._service, loaded.gammas, loaded.latency, self.tasks, rows)
        profile = TokenProfile(loaded.gammas, loaded.latency, useful.accuracy, rows)
        if self._config.policy == "algorithm_2":
            settings = self._config.algorithm_2 or Algorithm2Config()
            return useful, profile, Algorithm2Policy(profile, beta=settings.beta, kappa=settings.kappa)
        return useful, profile, ExactPolicy(profile, TimePrice(profile))


def batching(given: BatchingConfig, most_rows: int) -> Batching:
    """What the configuration says, in the policy's units."""
    factor = math.inf if given.factor is None else given.factor
    return Batching(given.delta_ms / 1e3, most_rows, given.eta_ms / 1e3, given.mu, factor)


async def assemble(service: str, config: VisionConfig) -> Assembled:
    """What answers for `service`, at once: compiled code is used where it has been compiled. Raises ModelError."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="vision")
    loaded = await asyncio.get_running_loop().run_in_executor(worker, partial(load, config, compiling=False))
    return Assembled(service, config, loaded, worker)


def load(config: VisionConfig, progress: Progress | None = None, compiling: bool = True) -> Loaded:
    """The model of `config`, profiled for its gammas; slow, unless it was done before on this machine.

    If it is to be compiled, and has not been, that is done first, or left out unless `compiling`.

    Raises ModelError.
    """
    folder = sources.fetch_vision(config.model, progress=progress)

    import torch  # which the application's builder, and a replica that waits for its model, can do without

    from pliant.kernels import gpu_memory
    from pliant.kernels.vision import executor as vit_executor
    from pliant.kernels.vision import profile as vit_profile
    from pliant.kernels.vision.token_merging import token_counts

    gpu_memory.take_share(config.gpus)
    executor = vit_executor.load(
        folder, dtype=config.dtype, device=config.device, threads=config.threads, most_rows=MOST_ROWS
    )
    gammas = config.gammas or auto_gammas(config, executor.info, progress)
    gammas = _fitting(executor, gammas)
    gpu = config.device == "cuda"
    if gpu or (config.compile and (compiling or executor.is_prepared(gammas))):
        executor.prepare(gammas, progress)
    processor = torch.cuda.get_device_name() if gpu else _processor()
    versions = [_RECIPE, torch.__version__, version("timm")]
    how = [config.device, config.dtype, config.threads, executor.backend, executor.most_rows, processor]
    identity = _identity(folder, [versions, how])

    def measure(into: Path) -> None:
        batches = {min(rows, executor.most_rows) for rows in _BATCHES}
        table = vit_profile.measure(executor, gammas, sorted(batches), progress, _PROFILE_S)
        (into / _FILE).write_text(json.dumps(asdict(table)))

    name = hashlib.sha256(json.dumps([identity, gammas]).encode()).hexdigest()[:16]
    kept = made_once(cache_folder() / "profiles" / f"{folder.name}-vision-{name}", measure)
    table = vit_profile.LatencyTable(**json.loads((kept / _FILE).read_text()))

    def latency(gamma: int, rows: int) -> float:
        return table.latency(gamma, executor.computed_rows(rows))

    info = executor.info
    counts = {gamma: token_counts(info.tokens, info.prefix, info.layers, gamma) for gamma in {0, *gammas} if gamma <= 0}
    own = {gamma: accuracy for gamma, accuracy in assumed_accuracies(counts).items() if gamma in gammas}
    return Loaded(executor, gammas, latency, table.batches, executor.memory_bytes, identity, own)


def auto_gammas(config: VisionConfig, info: VisionInfo, progress: Progress | None = None) -> tuple[int, ...]:
    """What the model's token count suggests to merge, 0, and what the tasks of the folder have prompts for.

    Where tasks may come later, but none is there to tell, usual numbers of prompts.
    """
    prompts: set[int] = set()
    for folder in _task_folders(config, progress):
        try:
            prompts.update(read_task(folder, info).prompts)
        except TaskError as error:
            logger.debug("no gammas are taken from it: %s", error)
    if not prompts and (config.tasks.folder or config.tasks.roots):
        prompts.update(USUAL_PROMPTS)
    return (*merging_gammas(info), 0, *sorted(prompts))


def _task_folders(config: VisionConfig, progress: Progress | None) -> list[Path]:
    """Those there are; the planner reports to clients what is wrong with the folder around them."""
    if not config.tasks.folder:
        return []
    try:
        return sources.task_folders(config.tasks.folder, progress)
    except (ModelError, OSError) as error:
        logger.warning("no gammas are taken from tasks: %s", error)
        return []


def _fitting(executor: VisionExecutor, gammas: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `gammas` of which an image fits into memory (OTAS, equation 1c).

    The executor's largest batch becomes what fits with each of them. Raises ModelError if there is none.
    """
    free = executor.free_bytes()
    fitting = tuple(gamma for gamma in gammas if executor.memory_bytes(gamma, 1) <= free)
    if not fitting:
        needed = min(executor.memory_bytes(gamma, 1) for gamma in gammas)
        raise ModelError(
            f"{executor.info.architecture}: an image takes {needed / 1e6:.0f} MB beside the weights, but only "
            f"{free / 1e6:.0f} MB are free; choose a smaller model, or a device with more memory"
        )
    if dropped := set(gammas) - set(fitting):
        logger.warning("memory does not suffice for gamma %s", ", ".join(map(str, sorted(dropped))))
    while any(executor.memory_bytes(gamma, executor.most_rows) > free for gamma in fitting):
        executor.most_rows -= 1
    return fitting


def _identity(folder: Path, what: list[Any]) -> str:
    weights = (folder / "model.safetensors").resolve().stat()
    files = [str(folder.resolve()), weights.st_size, weights.st_mtime_ns, (folder / "config.json").read_text()]
    return hashlib.sha256(json.dumps([files, what]).encode()).hexdigest()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith("model name")), platform.processor())
