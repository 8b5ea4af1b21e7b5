"""The live part of the vision benchmark, in virtual time: what becomes of each query, and the order of systems."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from support import virtual_loop

from pliant.bench.vision import live_plots, profiles, workload
from pliant.bench.vision.live_run import ALGORITHM_2, OURS, Served, System, fixed, serve, with_images
from pliant.bench.vision.live_service import Repeated, Service, roles
from pliant.deployments.vision.tasks import Tasks
from pliant.formats.vision_task import TaskRef
from pliant.simulation.vision.outcome import Fate
from pliant.training.vision import Examples

PAPER = profiles.paper()


class Scripted:
    """A device as fast as the paper's, whose answer is always label 0."""

    backend = "scripted"

    async def run(self, images: Sequence[bytes], tasks: Sequence[str], gamma: int) -> Sequence[NDArray[np.float32]]:
        await asyncio.sleep(PAPER.latency(gamma, len(images)))
        return [np.array([1, 0], np.float32)] * len(images)

    async def ready(self) -> None:
        """Nothing else computes."""

    async def load(self, task: TaskRef) -> Mapping[int, float]:
        return PAPER.accuracies[task.name]

    async def unload(self, task: TaskRef) -> None:
        raise AssertionError("all tasks fit")


async def service(label: int, labelled: bool = True) -> Service:
    device = Scripted()
    tasks = Tasks(device)
    refs = {name: TaskRef(name, "", "", 2, (2, 4, 8)) for name in PAPER.accuracies}
    for ref in refs.values():
        await tasks.acquire(ref)
    examples = Examples(np.zeros((3, 2, 2, 3), np.uint8), np.full(3, label, np.int64))
    held_out = dict.fromkeys(refs, examples)
    return Service(device, tasks, refs, held_out, PAPER.gammas, PAPER.latency, 64, "scripted", labelled)


def run(system: System, load: float, label: int = 0, labelled: bool = True, seconds: int = 4) -> Served:
    async def main() -> Served:
        made = await service(label, labelled)
        queries = workload.Trace((load,) * seconds, seed=1).queries(PAPER.per_s(), roles(made))
        return await serve(made, system, with_images(queries, made, seed=1))

    return virtual_loop.run(main())


def test_under_a_light_load_all_answers_are_in_time_and_the_label_says_whether_they_are_right() -> None:
    right, wrong = run(fixed(0), 0.3), run(fixed(0), 0.3, label=1)
    assert right.outcome.share(Fate.RIGHT) == 1
    assert wrong.outcome.share(Fate.WRONG) == 1
    assert wrong.outcome.utility == 0
    assert {gamma for _, gamma in right.gammas} == {0}


def test_without_labels_answers_are_right_as_often_as_the_profile_says() -> None:
    shares = run(fixed(0), 0.3, labelled=False).outcome
    expected = np.mean([of_gamma[0] for of_gamma in PAPER.accuracies.values()])
    assert shares.share(Fate.RIGHT) == pytest.approx(expected, abs=0.05)
    assert shares.share(Fate.RIGHT) + shares.share(Fate.WRONG) == 1


@pytest.mark.parametrize("system", [OURS, ALGORITHM_2, fixed(0), fixed(8), fixed(-15)], ids=lambda system: system.name)
def test_every_query_has_one_fate_in_an_overload(system: System) -> None:
    outcome = run(system, 1.5).outcome
    assert sum(outcome.share(fate) for fate in Fate) == pytest.approx(1)
    assert outcome.share(Fate.LATE) == 0, "in virtual time batches take what the profile says"


def test_in_an_overload_ours_merges_and_earns_more_than_pets() -> None:
    ours, pets = run(OURS, 1.5), run(fixed(0), 1.5)
    assert ours.outcome.utility > pets.outcome.utility
    assert pets.outcome.share(Fate.EVICTED) > 0.1
    assert min(gamma for _, gamma in ours.gammas) < 0


def test_images_are_of_the_querys_task_and_the_same_each_time() -> None:
    async def main() -> None:
        made = await service(1)
        queries = workload.Trace((0.1,), seed=2).queries(PAPER.per_s(), roles(made))
        assert with_images(queries, made, seed=3) == with_images(queries, made, seed=3)

    virtual_loop.run(main())


def test_the_hardest_task_has_the_role_of_cifar100() -> None:
    async def main() -> tuple[str, ...]:
        return roles(await service(0))

    assert virtual_loop.run(main())[1] == "CIFAR100"


def test_a_fast_device_computes_each_batch_as_often_as_makes_it_the_papers() -> None:
    class Fast:
        backend, most_rows = "fast", 4
        info = SimpleNamespace(height=2, width=2, channels=3)

        def __init__(self) -> None:
            self.runs = 0

        def own_task(self) -> None: ...
        def add_task(self, key: str, weights: None) -> None: ...
        def remove_task(self, key: str) -> None: ...

        def run(self, images: NDArray[np.uint8], tasks: Sequence[str], gamma: int) -> list[NDArray[np.float32]]:
            self.runs += 1
            return []

    fast = Fast()
    repeated = Repeated(fast)  # type: ignore[arg-type]
    fast.runs = 0
    repeated.run(np.zeros((1, 2, 2, 3), np.uint8), ["digit"], 0)
    assert fast.runs == repeated.times > 1


def test_plots_are_drawn() -> None:
    assert live_plots.gammas([0.5, 1.1], [(0.1, 0), (1.2, -5)]).axes
    assert live_plots.types({"ours": [0.8, 0.1, 0.0, 0.1]}).axes
