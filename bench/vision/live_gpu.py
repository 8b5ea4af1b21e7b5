"""A vision transformer on one GPU: what each gamma costs, what CUDA graphs save, and the live engine under a load that
swings (OTAS §V).

    PYTHONPATH=src python -m pliant.bench.vision.live_gpu --out results

needs neither Ray nor a checkpoint: weights are random, in the shape of ViT-Base and in bfloat16. Tasks have random
heads and prompts, and are right as often as those of the paper; everything else is measured. Beside torch it needs
timm, safetensors, filelock and platformdirs. `--device cpu` tries it where there is no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pliant.bench.vision import profiles, workload
from pliant.bench.vision.live_run import ALGORITHM_2, OURS, Served, fixed, serve, with_images
from pliant.bench.vision.live_service import Repeated, Service, capacity, roles
from pliant.bench.vision.merging_speed import Case, measure, random_vit
from pliant.deployments.vision.device import ExecutorDevice
from pliant.deployments.vision.tasks import Tasks, key
from pliant.formats.vision_task import TaskRef
from pliant.kernels.vision import executor as vit_executor
from pliant.kernels.vision import profile as vit_profile
from pliant.kernels.vision.executor import VisionExecutor
from pliant.kernels.vision.profile import LatencyTable
from pliant.kernels.vision.tasks import TaskWeights
from pliant.models.vision_head import Head
from pliant.models.vision_info import merging_gammas
from pliant.simulation.vision.outcome import Fate
from pliant.training.vision import Examples

_PROMPTS = (2, 4, 8)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_LABELS = 10
_SYSTEMS = (OURS, ALGORITHM_2, *map(fixed, (-20, -15, -10, 0, 2, 8)))
_PETS = fixed(0).name


class _RandomTasks(ExecutorDevice):
    """Tasks of random numbers that are as accurate as the paper's."""

    def __init__(self, executor: Repeated, worker: ThreadPoolExecutor, weights: TaskWeights) -> None:
        super().__init__(executor, worker, (), "random")
        self._weights = weights

    async def load(self, task: TaskRef) -> Mapping[int, float]:
        await self._in_worker(lambda: self._executor.add_task(key(task), self._weights))
        return profiles.paper().accuracies[task.name]


async def live(executor: VisionExecutor, table: LatencyTable, seconds: int, repetitions: int) -> dict[str, Any]:
    """Utility and type 1 shares of all systems, each run on the same queries, in another order each time."""
    service = await _service(executor, table)
    runs: dict[str, list[Served]] = {system.name: [] for system in _SYSTEMS}
    rates = []
    for repetition in range(repetitions):
        rates.append(await capacity(service))
        queries = workload.synthetic(seconds, repetition).queries(rates[-1], roles(service))
        asked = with_images(queries, service, repetition)
        for system in random.Random(repetition).sample(_SYSTEMS, len(_SYSTEMS)):
            runs[system.name].append(await serve(service, system, asked))
    earned = {name: np.array([run.outcome.expected for run in served]) for name, served in runs.items()}
    ours, others = earned[OURS.name], [earned[fixed(gamma).name] for gamma in (-20, -15, -10, 0, 2, 8)]
    figures = {
        "utility_vs_pets_live": float(np.median(ours / earned[_PETS])),
        "utility_vs_best_fixed_live": float(np.median(ours / np.max(others, axis=0))),
        "exact_vs_algorithm2_utility_live": float(np.median(ours / earned[ALGORITHM_2.name])),
        "type1_share_live": statistics.median(run.outcome.share(Fate.RIGHT) for run in runs[OURS.name]),
        "decision_ms_p99_live": statistics.median(run.decision_ms for run in runs[OURS.name]),
    }
    return {
        "figures": figures,
        "per_s": rates,
        "about": service.about,
        "utility": {name: values.tolist() for name, values in earned.items()},
        "types": {
            name: [statistics.fmean(run.outcome.share(fate) for run in served) for fate in Fate]
            for name, served in runs.items()
        },
    }


async def _service(executor: VisionExecutor, table: LatencyTable) -> Service:
    info = executor.info
    repeated = Repeated(executor)
    generator = torch.Generator().manual_seed(0)
    prompts = {gamma: torch.randn(info.layers, gamma, info.hidden, generator=generator) for gamma in _PROMPTS}
    head = Head(torch.randn(_LABELS, info.hidden, generator=generator), torch.zeros(_LABELS))
    weights = TaskWeights({0: head}, prompts)
    device = _RandomTasks(repeated, ThreadPoolExecutor(1), weights)
    tasks = Tasks(device)
    refs = {name: TaskRef(name, "", "", _LABELS, _PROMPTS) for name in profiles.paper().accuracies}
    for ref in refs.values():
        await tasks.acquire(ref)
    size = (executor.most_rows, info.height, info.width, info.channels)
    images = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
    return Service(
        device,
        tasks,
        refs,
        dict.fromkeys(refs, Examples(images, np.zeros(len(images), np.int64))),
        table.gammas,
        lambda gamma, rows: repeated.times * table.latency(gamma, rows),
        executor.most_rows,
        f"{info.architecture}, {executor.backend}, each batch computed {repeated.times} times",
        labelled=False,
    )


def _table(executor: VisionExecutor, budget_s: float) -> LatencyTable:
    gammas = (*merging_gammas(executor.info), 0, *_PROMPTS)
    return vit_profile.measure(executor, gammas, _BATCHES, budget_s=budget_s)


def _merging(case: Case, blocks: int, budget_s: float) -> dict[str, Any]:
    speeds = measure(case, 1, blocks, budget_s)
    return {
        "backend": speeds.backend,
        "milliseconds": {rows: seconds * 1e3 for rows, seconds in speeds.seconds.items()},
        "speedups": {f"r{r} batch {rows}": statistics.median(of) for (r, rows), of in speeds.speedups.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a plain VisionTransformer of timm's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="shorter and fewer runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for what is measured")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU that CUDA can use; choose --device cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    seconds, repetitions, budget_s = (4, 1, 2.0) if given.quick else (20, 5, 20.0)
    folder = random_vit(given.model)
    executor = vit_executor.load(folder, dtype=given.dtype, device=given.device)
    tables = {executor.backend: _table(executor, budget_s)}
    if given.device == "cuda":
        executor.prepare(tables[executor.backend].gammas)
        tables[executor.backend] = _table(executor, budget_s)
    table = tables[executor.backend]
    found = asyncio.run(live(executor, table, seconds, repetitions))
    case = Case(given.model, folder, (1, 8, 32, 64), given.dtype, given.device, given.device == "cuda")
    cases = [case._replace(prepared=prepared) for prepared in {False, case.prepared}]
    found["merging"] = [_merging(each, 3, budget_s) for each in cases]
    found["latency"] = {backend: asdict(each) for backend, each in tables.items()}
    found["machine"] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    (given.out / "vision_gpu.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({name: found[name] for name in ("figures", "about", "per_s", "types", "merging")}, indent=2))


if __name__ == "__main__":
    main()
