"""A replica put together from a small model and real tasks: it profiles once, measures accuracies, and answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.vision_folders import task_folder, vision_folder, vision_model

from pliant.config.vision import BatchingConfig, VisionConfig
from pliant.deployments.vision import assembly
from pliant.deployments.vision.messages import Answer, Query
from pliant.deployments.vision.tasks import key
from pliant.errors import ModelError
from pliant.formats.vision_task import own_task, read_profiling, read_task
from pliant.kernels.vision import packages as vit_packages
from pliant.kernels.vision import profile as vit_profile
from pliant.kernels.vision.executor import CpuExecutor
from pliant.policies.vision.slo_batching import Batching


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vit_packages, "cxx_compiler", lambda: None)
    monkeypatch.setattr(vit_profile, "_ROUNDS", (1, 1))
    monkeypatch.setattr(assembly, "_BATCHES", (1, 8))


async def test_from_folders_to_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    info = vision_folder(tmp_path / "model")
    infos = [
        read_task(task_folder(tmp_path / "tasks" / name, info, labels, prompts, images=20, seed=seed), info)
        for seed, (name, labels, prompts) in enumerate([("two", ("a", "b"), (1, 2)), ("three", ("a", "b", "c"), (2,))])
    ]
    config = VisionConfig(kind="vision", model=str(tmp_path / "model"), tasks=str(tmp_path / "tasks"))
    assembled = await assembly.assemble("digits", config)
    engine, tasks = assembled.engine, assembled.tasks
    assert assembly.auto_gammas(config, info) == (-7, -5, -3, -2, 0, 1, 2)
    images, _ = read_profiling(infos[0])
    queries = [Query(image.tobytes(), infos[row % 2].ref, 60.0, 1.0) for row, image in enumerate(images)]
    replies = await asyncio.gather(*(engine.classify(query) for query in queries))
    for row, reply in enumerate(replies):
        assert isinstance(reply, Answer)
        assert np.frombuffer(reply.logits, "<f4").shape == (2 + row % 2,)
    assert engine.report()["in_time"] == 20
    assert set(engine.report()["gammas"]) == {-7, -5, -3, -2, 0, 1, 2}
    await tasks.measured()
    for each in infos:
        right = [tasks.accuracy(key(each.ref), gamma) for gamma in (-7, 0, 2)]
        assert all(share is not None and share * 20 == pytest.approx(round(share * 20)) for share in right)
    assert tasks.accuracy(key(infos[1].ref), 1) is None, "it has no such prompts"
    await engine.close()

    monkeypatch.setattr(vit_profile, "measure", lambda *_: 1 / 0)
    again = await assembly.assemble("digits", config)
    await again.engine.close()


async def test_compiled_code_takes_over_from_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: CpuExecutor, gammas: Sequence[int], _progress: object = None) -> None:
        self._forwards = {gamma: self._features(gamma) for gamma in gammas}
        self.backend = "aoti"

    monkeypatch.setattr(CpuExecutor, "prepare", prepare)
    info = vision_folder(tmp_path)
    config = VisionConfig(kind="vision", model=str(tmp_path), gammas=(-2, 0), compile=True)
    assembled = await assembly.assemble("digits", config)
    engine, task = assembled.engine, own_task(str(tmp_path), len(info.labels))
    image = np.random.default_rng(0).integers(0, 256, (info.height, info.width, 3), dtype=np.uint8).tobytes()

    async def answered() -> Answer:
        reply = await engine.classify(Query(image, task, 60.0, 1.0))
        assert isinstance(reply, Answer)
        return reply

    before = await answered()
    assert (assembled.compiling, engine.report()["backend"]) == (True, "eager")
    await asyncio.gather(assembled.compile(), *(answered() for _ in range(5)))
    after = await answered()
    await engine.close()
    assert (assembled.compiling, engine.report()["backend"]) == (False, "aoti")
    assert np.frombuffer(after.logits, "<f4") == pytest.approx(np.frombuffer(before.logits, "<f4"), abs=1e-4)
    assert engine.report()["in_time"] == 7


async def test_an_unmodified_model_answers_with_its_own_head(tmp_path: Path) -> None:
    model = vision_model()
    info = vision_folder(tmp_path, model)
    assembled = await assembly.assemble("digits", VisionConfig(kind="vision", model=str(tmp_path)))
    engine, tasks = assembled.engine, assembled.tasks
    task = own_task(str(tmp_path), len(info.labels))
    image = np.random.default_rng(0).integers(0, 256, (info.height, info.width, 3), dtype=np.uint8)
    reply = await engine.classify(Query(image.tobytes(), task, 60.0, 1.0))
    await engine.close()
    assert isinstance(reply, Answer)
    assert reply.gamma == 0
    normalised = (torch.from_numpy(image / 255.0) - torch.tensor(info.mean)) / torch.tensor(info.std)
    with torch.inference_mode():
        expected = model(normalised.permute(2, 0, 1)[None].float())[0]
    np.testing.assert_allclose(np.frombuffer(reply.logits, "<f4"), expected.numpy(), atol=1e-4)
    known = [tasks.accuracy(key(task), gamma) for gamma in (-7, -2, 0)]
    assert known == sorted(known)
    assert (known[-1], tasks.accuracy(key(task), 2)) == (1.0, None)


@pytest.fixture
def roomy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], VisionConfig]:
    """A service whose device has so many bytes left, and computes batches of up to 8 as such of 8."""

    (tmp_path / "model").mkdir()
    vision_folder(tmp_path / "model")

    def make(free_bytes: float) -> VisionConfig:
        monkeypatch.setattr(CpuExecutor, "free_bytes", lambda _executor: free_bytes)
        monkeypatch.setattr(CpuExecutor, "computed_rows", lambda _executor, rows: max(rows, 8))
        return VisionConfig(kind="vision", model=str(tmp_path / "model"), gammas=(-2, 0, 400))

    return make


def test_batches_cost_what_is_computed(roomy: Callable[[float], VisionConfig]) -> None:
    loaded = assembly.load(roomy(math.inf))
    assert (loaded.gammas, loaded.executor.most_rows, loaded.measured) == ((-2, 0, 400), 64, (1, 8))
    assert loaded.latency(0, 1) == loaded.latency(0, 8)
    assert loaded.memory_bytes(0, 1) == loaded.memory_bytes(0, 8) < loaded.memory_bytes(0, 9)


def test_what_does_not_fit_into_memory_is_left_out_before_it_is_prepared(
    roomy: Callable[[float], VisionConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needed = assembly.load(roomy(math.inf)).memory_bytes
    prepared: list[tuple[object, int]] = []
    monkeypatch.setattr(
        CpuExecutor, "prepare", lambda self, gammas, _progress: prepared.append((gammas, self.most_rows))
    )
    config = roomy(needed(-2, 20)).model_copy(update={"compile": True})
    loaded = assembly.load(config)
    assert prepared == [((-2, 0), 20)]
    assert (loaded.gammas, loaded.executor.most_rows) == ((-2, 0), 20)
    assert "memory does not suffice for gamma 400" in caplog.text
    with pytest.raises(ModelError, match=r"an image takes .* MB beside the weights, but only 0 MB are free"):
        assembly.load(roomy(100))


def test_another_version_of_timm_is_measured_anew(
    roomy: Callable[[float], VisionConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = assembly.load(roomy(math.inf)).identity
    assert assembly.load(roomy(math.inf)).identity == before
    monkeypatch.setattr(assembly, "version", lambda _name: "another")
    assert assembly.load(roomy(math.inf)).identity != before


def test_gammas_are_the_usual_ones_while_the_tasks_are_away(tmp_path: Path) -> None:
    info = vision_folder(tmp_path)
    config = VisionConfig(kind="vision", model=str(tmp_path), tasks=str(tmp_path / "none"))
    assert assembly.auto_gammas(config, info) == (-7, -5, -3, -2, 0, 2, 4, 8)


@pytest.mark.parametrize(
    ("batching", "rows"),
    [
        (BatchingConfig(), 1),
        (BatchingConfig(factor=None), 1),
        (BatchingConfig(factor=None, eta_ms=2000), 2),
        (BatchingConfig(factor=None, eta_ms=2000, mu=0.3), 1),
    ],
)
async def test_images_wait_together_as_the_configuration_says(
    tmp_path: Path, batching: BatchingConfig, rows: int
) -> None:
    info = vision_folder(tmp_path)
    config = VisionConfig(kind="vision", model=str(tmp_path), gammas=(0,), policy="algorithm_2", batching=batching)
    assembled = await assembly.assemble("digits", config)
    task = own_task(str(tmp_path), len(info.labels))
    image = bytes(info.height * info.width * 3)
    queries = [Query(image, task, 60.0, 0.1), Query(image, task, 61.0, 0.5)]
    replies = await asyncio.gather(*map(assembled.engine.classify, queries))
    assert [isinstance(reply, Answer) and reply.rows for reply in replies] == [rows, rows]
    await assembled.engine.close()


def test_the_paper_s_batching_is_a_configuration() -> None:
    given = BatchingConfig(delta_ms=100, eta_ms=200, mu=0.3, factor=None)
    assert assembly.batching(given, 64) == Batching(0.1, 64, 0.2, 0.3, math.inf)
    assert assembly.batching(BatchingConfig(), 64) == Batching()
