"""Batches of mixed tasks get from one forward pass what timm and each task's own head and prompts give."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.slow_vit import merged_features, prompted_features
from support.vision_folders import SMALL, task_folder, vision_folder, vision_model
from torch import Tensor

from pliant.errors import ModelError
from pliant.formats.vision_task import WEIGHTS, TaskError
from pliant.kernels.vision import executor as vit_executor
from pliant.kernels.vision import packages as vit_packages
from pliant.kernels.vision.executor import VisionExecutor
from pliant.kernels.vision.packages import CannotCompileError, VitSpec
from pliant.kernels.vision.tasks import TaskWeights, read_weights
from pliant.models.vision_head import Head
from pliant.models.vision_info import VisionInfo
from pliant.training.vision import normalised

LABELS = {"a": 2, "b": 7}
HEADS_OF_B = {-50: -3, -3: -3, -2: -3, -1: 0, 0: 0, 1: 0, 2: 2}
"""By gamma."""
requires_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and, in folders of their own within it, its tasks a and b, both with prompts for 1 and 2; b has heads for
    -3 and 2, too.
    """
    folder = tmp_path_factory.mktemp("a model")
    model = vision_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    info = vision_folder(folder, model)
    write_tasks(folder, info)
    return folder


def write_tasks(folder: Path, info: VisionInfo) -> None:
    for seed, (name, labels) in enumerate(LABELS.items()):
        heads = (-3, 2) if name == "b" else ()
        named = [f"{name}{label}" for label in range(labels)]
        task_folder(folder / name, info, labels=named, heads=heads, seed=seed)


@pytest.fixture
def executor(folder: Path) -> VisionExecutor:
    return with_tasks(vit_executor.load(folder, most_rows=8), folder)


def with_tasks(executor: VisionExecutor, folder: Path) -> VisionExecutor:
    for name in LABELS:
        executor.add_task(name, executor.stage(folder / name))
    return executor


def pixels(executor: VisionExecutor, count: int, seed: int = 0) -> NDArray[np.uint8]:
    info = executor.info
    size = (count, info.height, info.width, info.channels)
    return np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8)


def expected(executor: VisionExecutor, folder: Path, images: NDArray[np.uint8], tasks: str, gamma: int) -> list[Tensor]:
    """The logits of each row by itself, from its definition."""
    model = executor._vit.model
    answers = []
    for image, task in zip(normalised(images, executor.info), tasks, strict=True):
        weights = read_weights(folder / task)
        if gamma > 0:
            features = prompted_features(model, image, weights.prompts[gamma])
        else:
            features = merged_features(model, image, -gamma)
        head = weights.heads[HEADS_OF_B[gamma] if task == "b" else 0]
        answers.append(head.weight @ features + head.bias)
    return answers


def assert_answers(executor: VisionExecutor, folder: Path, tasks: str, gamma: int, tolerance: float = 1e-4) -> None:
    images = pixels(executor, len(tasks))
    answers = executor.run(images, list(tasks), gamma)
    assert all(answer.dtype == np.float32 for answer in answers)
    for answer, logits in zip(answers, expected(executor, folder, images, tasks, gamma), strict=True):
        np.testing.assert_allclose(answer, logits.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gamma", [-50, -3, -1, 0, 1, 2])
@pytest.mark.parametrize("tasks", ["a", "bb", "abbaab"])
def test_each_row_gets_its_own_prompts_and_head(executor, folder, tasks, gamma) -> None:
    assert executor.backend == "eager"
    assert_answers(executor, folder, tasks, gamma)


def test_features_are_made_once_for_each_gamma(executor) -> None:
    for gamma in (0, -3, 0):
        executor.run(pixels(executor, 1), ["a"], gamma)
    assert executor._forward(0) is executor._forward(0)
    assert sorted(executor._forwards) == [-3, 0]


def test_the_models_own_head_is_a_task(executor) -> None:
    own = executor.own_task()
    executor.add_task("own", own)
    images = pixels(executor, 3)
    answers = executor.run(images, ["own", "a", "own"], 0)
    logits = executor._vit.model(normalised(images, executor.info)).numpy()
    np.testing.assert_allclose(answers[0], logits[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(answers[2], logits[2], rtol=1e-5, atol=1e-5)
    assert answers[1].shape == (2,)


def test_a_model_without_a_head_has_no_task_of_its_own(tmp_path) -> None:
    vision_folder(tmp_path, vision_model(num_classes=0))
    assert vit_executor.load(tmp_path).own_task() is None


def test_tasks_come_and_go(executor, folder) -> None:
    images = pixels(executor, 2)
    before = executor.run(images, ["a", "b"], 1)
    executor.add_task("c", TaskWeights({0: Head(torch.ones(3, 24), torch.zeros(3))}, {}))
    assert [len(row) for row in executor.run(images, ["c", "b"], 0)] == [3, 7]
    with pytest.raises(ValueError, match=r"task c has no prompts for gamma 1, only for \[\]"):
        executor.run(images, ["a", "c"], 1)
    executor.remove_task("b")
    with pytest.raises(ValueError, match="task b is not in memory"):
        executor.run(images, ["a", "b"], 0)
    executor.add_task("b", executor.stage(folder / "b"))
    for row, again in zip(before, executor.run(images, ["a", "b"], 1), strict=True):
        np.testing.assert_array_equal(row, again)


def test_refuses_tasks_that_do_not_fit(executor) -> None:
    with pytest.raises(ValueError, match="task a is there already"):
        executor.add_task("a", TaskWeights({0: Head(torch.ones(3, 24), torch.zeros(3))}, {}))
    with pytest.raises(ValueError, match=r"task c: its head\.weight is \[3, 25\]; this model needs \[3, 24\]"):
        executor.add_task("c", TaskWeights({0: Head(torch.ones(3, 25), torch.zeros(3))}, {}))
    with pytest.raises(ValueError, match=r"its prompts\.2 is \[3, 1, 24\]; this model needs \[3, 2, 24\]"):
        executor.add_task("c", TaskWeights({0: Head(torch.ones(3, 24), torch.zeros(3))}, {2: torch.zeros(3, 1, 24)}))
    with pytest.raises(KeyError):
        executor.remove_task("c")


@pytest.mark.parametrize(
    ("images", "tasks", "reason"),
    [
        (np.zeros((1, 16, 16, 3), np.float32), ["a"], "images must be uint8 .* got float32"),
        (np.zeros((1, 16, 15, 3), np.uint8), ["a"], r"got uint8 \[1, 16, 15, 3\]"),
        (np.zeros((16, 16, 3), np.uint8), ["a"], r"got uint8 \[16, 16, 3\]"),
        (np.zeros((0, 16, 16, 3), np.uint8), [], "1 to 8 images and a task for each; got 0 and 0"),
        (np.zeros((9, 16, 16, 3), np.uint8), ["a"] * 9, "got 9 and 9"),
        (np.zeros((2, 16, 16, 3), np.uint8), ["a"], "got 2 and 1"),
    ],
)
def test_refuses_what_is_no_batch(executor, images, tasks, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        executor.run(images, tasks, 0)


def test_images_that_may_not_be_written_will_do(executor) -> None:
    images = pixels(executor, 2)
    shared = np.frombuffer(images.tobytes(), np.uint8).reshape(images.shape)
    np.testing.assert_array_equal(executor.run(shared, ["a", "a"], 0), executor.run(images, ["a", "a"], 0))


def test_bfloat16(folder) -> None:
    executor = with_tasks(vit_executor.load(folder, dtype="bfloat16", most_rows=8), folder)
    exact = with_tasks(vit_executor.load(folder, most_rows=8), folder)
    images = pixels(exact, 8)
    for gamma in (0, 2):
        found, wanted = (np.concatenate(each.run(images, list("abbaabba"), gamma)) for each in (executor, exact))
        assert found.dtype == np.float32
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)
    assert all(np.isfinite(row).all() for row in executor.run(images, list("abbaabba"), -3))


def test_heads_stay_float32(folder) -> None:
    executor = with_tasks(vit_executor.load(folder, dtype="bfloat16", most_rows=8), folder)
    own, weights = executor.own_task(), read_weights(folder / "b")
    exact = vit_executor.load(folder).own_task()
    assert all(map(torch.equal, own.head(0), exact.head(0)))
    images = pixels(executor, 3)
    features = executor._features(0)(torch.from_numpy(images))
    assert features.dtype == torch.bfloat16
    logits = torch.nn.functional.linear(features.float(), *weights.head(0))
    np.testing.assert_allclose(executor.run(images, ["b"] * 3, 0), logits.numpy(), rtol=1e-5, atol=1e-5)


def test_more_tokens_take_more_memory(executor) -> None:
    bytes_by_gamma = [executor.memory_bytes(gamma, 4) for gamma in (0, 1, 2)]
    assert bytes_by_gamma == sorted(set(bytes_by_gamma))
    assert executor.memory_bytes(0, 8) == 2 * executor.memory_bytes(0, 4)


@requires_compiler
def test_compiled_answers_are_the_same(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "thin"
    info = vision_folder(folder, vision_model(depth=1))
    write_tasks(folder, info)
    executor = with_tasks(vit_executor.load(folder, most_rows=8), folder)
    steps: list[tuple[str, float]] = []
    executor.prepare([-3], lambda text, done: steps.append((text, done)))
    assert executor.backend == "aoti"
    assert steps == [("compiling for -3 tokens a layer", 0.0)]
    for tasks in ("a", "abbaabba"):
        assert_answers(executor, folder, tasks, -3)
    assert_answers(executor, folder, "ab", 1)

    monkeypatch.setattr(vit_packages, "_compile_apart", None)
    again = with_tasks(vit_executor.load(folder, most_rows=8), folder)
    again.prepare([-3])
    assert_answers(again, folder, "bab", -3)


@pytest.mark.parametrize(
    ("compiler", "reasons"),
    [
        (None, ["No C++ compiler was found"]),
        ("g++", ["for gamma -3 and runs uncompiled", "for gamma 0 and runs uncompiled"]),
    ],
)
def test_what_cannot_be_compiled_runs_eagerly(
    executor, folder, compiler, reasons, monkeypatch, tmp_path, caplog
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setattr(vit_packages, "cxx_compiler", lambda: compiler)
    monkeypatch.setattr(vit_packages.sys, "executable", shutil.which("false"))
    with caplog.at_level(logging.WARNING, "pliant"):
        executor.prepare([-3, 0])
    assert executor.backend == "eager"
    for record, reason in zip(caplog.records, reasons, strict=True):
        assert reason in record.message
    assert not list(tmp_path.glob("runtimes/*-float32-*[0-9a-f]"))
    assert_answers(executor, folder, "ab", -3)


def test_a_compile_that_hangs_is_given_up(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setattr(vit_packages, "LIMIT_S", 0.01)
    monkeypatch.setattr(vit_packages, "cxx_compiler", lambda: "g++")
    (reason,) = vit_packages.build([VitSpec(folder, 0, "float32", 1, 8)]).values()
    assert "took more than 0 s to compile" in reason


def test_what_can_be_compiled_is_kept_when_the_rest_cannot(executor, folder, monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    opened: list[Path] = []

    def compile_apart(spec: VitSpec, into: Path) -> None:
        if spec.gamma == -3:
            raise CannotCompileError("not this one")
        (into / "model").mkdir()
        if spec.gamma:
            (into / "model" / "a.wrapper.so").write_bytes(b"cut off")

    load = vit_packages.compiled_forward.load
    monkeypatch.setattr(vit_packages, "_compile_apart", compile_apart)
    monkeypatch.setattr(
        vit_packages.compiled_forward,
        "load",
        lambda package: load(package) if len(opened) else opened.append(package) or executor._features(-2),
    )
    executor.prepare([-2, -3, 0, 1])
    assert executor.backend == "aoti, but eager for gamma -3, 0, 1"
    assert [record.message.partition(":")[0] for record in caplog.records[:1]] == ["not this one"]
    assert all("delete it, to have it compiled again" in record.message for record in caplog.records[1:])
    assert "has no *.wrapper.so" in caplog.text
    assert "file too short" in caplog.text
    for gamma in (-2, -3, 0, 1):
        assert_answers(executor, folder, "ab", gamma)


@pytest.mark.parametrize("gamma", [-3, 0])
def test_wrong_features_are_not_accepted(executor, folder, gamma) -> None:
    from pliant.kernels.vision.compiler import verify

    info = executor.info
    half = vit_executor.load(folder, dtype="bfloat16")._features(gamma)
    exact, other = executor._features(gamma), executor._features(gamma + 1 if gamma else -3)
    with torch.inference_mode():
        verify(exact, exact, exact, info, 8)
        verify(half, half, exact, info, 8)
        with pytest.raises(ArithmeticError, match=r"compiled features differ by .* at 1 rows"):
            verify(other, exact, exact, info, 8)
        with pytest.raises(ArithmeticError, match="at 8 rows"):
            verify(lambda images: exact(images) + float(len(images) == 8), half, exact, info, 8)


def test_packages_differ_by_what_they_are_compiled_for(folder, monkeypatch) -> None:
    specs = [
        VitSpec(folder, 0, "float32", 1, 8),
        VitSpec(folder, 1, "float32", 1, 8),
        VitSpec(folder, 0, "bfloat16", 1, 8),
        VitSpec(folder, 0, "float32", 2, 8),
        VitSpec(folder, 0, "float32", 1, 16),
    ]
    packages = {spec.package for spec in specs}
    assert len(packages) == len(specs)
    monkeypatch.setattr(vit_packages, "version", lambda _name: "another")
    assert specs[0].package not in packages


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dtype": "int4"}, "choose float32 or bfloat16"),
        ({"device": "tpu"}, "choose cpu or cuda"),
        ({"threads": 0}, "at least 1 thread"),
        ({"most_rows": 1}, "2 rows"),
    ],
)
def test_refuses_what_it_cannot_load(folder, arguments, reason) -> None:
    with pytest.raises(ModelError, match=reason):
        vit_executor.load(folder, **arguments)


def changed(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the model whose config.json says something else."""
    shutil.copytree(folder, tmp_path / "changed")
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config | changes))
    return tmp_path / "changed"


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("no_such_vit", "Unknown model"),
        ("vit_tiny_r_s16_p8_224", "cannot be read as a vision transformer"),
        ("deit_tiny_distilled_patch16_224", "VisionTransformerDistilled"),
    ],
)
def test_refuses_other_architectures_in_one_line(folder, tmp_path, architecture, reason) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        vit_executor.load(changed(folder, tmp_path, architecture=architecture))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_heads": 0}, "ZeroDivisionError"),
        ({"patch_size": 0}, "ZeroDivisionError"),
        ({"norm_layer": "none"}, "cannot be read"),
        ({"attn_layer": "none"}, "cannot be read"),
        ({"depth": "x"}, "TypeError"),
    ],
)
def test_refuses_broken_arguments_in_one_line(folder, tmp_path, arguments, reason) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        vit_executor.load(changed(folder, tmp_path, model_args={**SMALL, **arguments}))
    assert "\n" not in str(caught.value)


def test_refuses_weights_of_another_shape_in_one_line(folder, tmp_path) -> None:
    other = changed(folder, tmp_path)
    weights = load_file(other / "model.safetensors")
    weights["blocks.0.mlp.fc1.weight"] = weights["blocks.0.mlp.fc1.weight"][:-1].clone()
    save_file(weights, other / "model.safetensors")
    with pytest.raises(ModelError, match=r"size mismatch for blocks\.0\.mlp\.fc1\.weight") as caught:
        vit_executor.load(other)
    assert "\n" not in str(caught.value)


def test_tasks_that_cannot_be_read(executor, folder, tmp_path) -> None:
    with pytest.raises(TaskError, match="cannot be opened"):
        executor.stage(tmp_path)
    tensors = load_file(folder / "a" / WEIGHTS)
    tensors["prompts.1"][0, 0, 0] = torch.nan
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(TaskError, match="not finite"):
        executor.stage(tmp_path)


@requires_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_gpu_answers_as_defined(folder, dtype, tolerance) -> None:
    """Whatever runs before, comes to memory or leaves it."""
    executor = with_tasks(vit_executor.load(folder, dtype=dtype, device="cuda", most_rows=20), folder)
    reference = with_tasks(vit_executor.load(folder, most_rows=20), folder)
    executor.prepare([-3, 0, 2])
    assert executor.backend == "cuda-graph"
    random = np.random.default_rng(0)
    for step in range(30):
        if step == 10:
            for each in (executor, reference):
                each.add_task("c", each.stage(folder / "b"))
        garbage = [torch.full((int(size),), torch.nan, device="cuda") for size in random.integers(1, 4096, 50)]
        del garbage[::2]
        tasks = list(random.choice(list("abc" if step >= 10 else "ab"), random.integers(1, 21)))
        gamma, images = (-3, 0, 2)[step % 3], pixels(executor, len(tasks), seed=step)
        pairs = zip(executor.run(images, tasks, gamma), reference.run(images, tasks, gamma), strict=True)
        far = [np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()) for found, wanted in pairs]
        assert np.isfinite(far).all()
        # In bfloat16 other pairs are merged than in float32.
        assert (np.max(far) if gamma >= 0 or dtype == "float32" else np.min(far)) <= tolerance
