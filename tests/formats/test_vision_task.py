"""Tasks' folders: what is read of them, and the one line that is said of those that cannot be served."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.vision_folders import change_json, change_tensors, task_folder, vision_folder

from pliant.formats.vision_task import (
    PROFILING,
    TASK,
    WEIGHTS,
    TaskError,
    TaskInfo,
    bytes_of,
    check_description,
    head_names,
    prompts_name,
    read_profiling,
    read_task,
)
from pliant.models.adapter_files import TensorFile
from pliant.models.vision_info import VisionInfo


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> VisionInfo:
    return vision_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(backbone: VisionInfo, tmp_path: Path) -> Path:
    return task_folder(tmp_path / "parity", backbone, images=6)


def refusal(folder: Path, backbone: VisionInfo) -> str:
    with pytest.raises(TaskError) as caught:
        read_task(folder, backbone)
    said = str(caught.value)
    assert said.isprintable()
    assert said.startswith("task ")
    assert len(said) < 600
    return said


def test_a_task_is_read(folder: Path, backbone: VisionInfo) -> None:
    task = read_task(folder, backbone)
    assert (task.name, task.labels, task.slo_ms, task.utility) == ("parity", ("no", "yes"), 600, 0.5)
    assert (task.prompts, task.accuracies) == ((1, 2), {-2: 0.7, 0: 0.8, 1: 0.9, 2: 0.9})
    assert list(task.accuracies) == [-2, 0, 1, 2]
    assert (task.folder, task.profiling_images) == (folder, 6)


def test_what_a_replica_is_told(folder: Path, backbone: VisionInfo) -> None:
    task = read_task(folder, backbone)
    ref = pickle.loads(pickle.dumps(task.ref))
    assert ref == task.ref
    assert (ref.name, ref.folder, ref.labels, ref.prompts) == ("parity", str(folder), 2, (1, 2))
    assert ref.key == f"parity@{task.revision}"


def test_a_task_may_have_neither_prompts_nor_images(backbone: VisionInfo, tmp_path: Path) -> None:
    task = read_task(task_folder(tmp_path / "bare", backbone, prompts=()), backbone)
    assert (task.prompts, task.profiling_images) == ((), 0)
    assert list(task.accuracies) == [-2, 0]
    with pytest.raises(TaskError, match=r"its profiling\.safetensors"):
        read_profiling(task)


def test_the_profiling_set_is_as_it_was_saved(folder: Path, backbone: VisionInfo) -> None:
    images, labels = read_profiling(read_task(folder, backbone))
    assert (images.shape, images.dtype) == ((6, 16, 16, 3), np.uint8)
    assert (labels.shape, labels.dtype) == ((6,), np.int64)
    assert np.array_equal(images, load_file(folder / PROFILING)["images"])


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("labels", np.full(6, 2), "has labels from 2 to 2, the task 2 of them"),
        ("labels", np.full(6, -1), "has labels from -1 to -1"),
        ("labels", np.zeros(6, np.uint8), "stores labels as U8 instead of I64"),
        ("images", np.zeros((6, 16, 16, 3), np.int64), "stores images as I64 instead of U8"),
    ],
)
def test_a_profiling_set_that_means_nothing_is_refused(
    name: str, array: np.ndarray[Any, Any], words: str, folder: Path, backbone: VisionInfo
) -> None:
    change_tensors(folder / PROFILING, **{name: array})
    with pytest.raises(TaskError, match=words):
        read_profiling(read_task(folder, backbone))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": np.zeros((5, 16, 16, 3), np.uint8)}, "has 5 x 16 x 16 x 3 images and 6 labels: they have changed"),
        ({"images": np.zeros((6, 768), np.uint8)}, "has 6 x 768 images"),
        ({"images": np.zeros((5, 16, 16, 3), np.uint8), "labels": np.zeros(5, np.int64)}, "they have changed"),
        ({"without": "images"}, "has no 'images'"),
    ],
)
def test_a_profiling_set_that_changed_meanwhile_is_refused(
    changes: dict[str, Any], words: str, folder: Path, backbone: VisionInfo
) -> None:
    task = read_task(folder, backbone)
    change_tensors(folder / PROFILING, **changes)
    with pytest.raises(TaskError, match=words):
        read_profiling(task)


def test_a_profiling_set_that_becomes_a_link_or_is_cut_off_is_an_error(
    folder: Path, backbone: VisionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the end of the process, as it would be if the file were mapped."""
    task, file = read_task(folder, backbone), folder / PROFILING
    read = TensorFile.read

    def cut_off(opened: TensorFile, name: str) -> bytearray:
        os.truncate(file, 600)
        return read(opened, name)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "read", cut_off)
        with pytest.raises(TaskError, match=r"its profiling\.safetensors was cut off at byte"):
            read_profiling(task)
    file.rename(folder / "moved")
    file.symlink_to(folder / "moved")
    with pytest.raises(TaskError, match=r"its profiling\.safetensors is a link"):
        read_profiling(task)


def test_the_revision_follows_the_content_of_all_files(folder: Path, backbone: VisionInfo, tmp_path: Path) -> None:
    revisions = [read_task(folder, backbone).revision]
    assert read_task(shutil.copytree(folder, tmp_path / "copy"), backbone).revision == revisions[0]
    change_json(folder / TASK, utility=0.25)
    revisions.append(read_task(folder, backbone).revision)
    for name in (WEIGHTS, PROFILING):
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
        revisions.append(read_task(folder, backbone).revision)
    assert len(set(revisions)) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": None}, "its name is None"),
        ({"name": "a/b"}, "its name is 'a/b'; it must be at most 64 letters"),
        ({"name": "x" * 65}, "its name is 'xxx"),
        ({"name": "a\n"}, "its name is 'a\\n'"),
        ({"labels": "ab"}, "its labels are 'ab'; it must list from 2"),
        ({"labels": ["one"]}, "its labels are ['one']; it must list from 2"),
        ({"labels": ["a", 1]}, "one of its labels is 1"),
        ({"labels": ["a", ""]}, "one of its labels is ''"),
        ({"labels": ["a", "b\nc"]}, "one of its labels is 'b\\nc'"),
        ({"labels": ["a", "a"]}, "it has the label 'a' 2 times"),
        ({"labels": ["a", "b", "c"]}, "its head.weight is 2 x 24, where 3 labels"),
        ({"slo_ms": 0}, "its slo_ms is 0; it must be a number above 0"),
        ({"slo_ms": None}, "its slo_ms is None"),
        ({"utility": True}, "its utility is True"),
        ({"utility": 10**400}, "at most 1,000,000"),
        ({"gammas": None}, "its gammas are None"),
        ({"gammas": {}}, "it has no accuracy for gamma 0"),
        ({"gammas": {"0": 0.5, "1": 0.5}}, "it has no accuracy for gamma 2"),
        ({"gammas": {"0": 0.5, "1": 0.5, "2": 0.5, "3": 0.5}}, "gamma 3, but no prompts.3 in its task.safetensors"),
        ({"gammas": {"-9": 0.5}}, "gamma -9; no layer of this model merges more than 8"),
        ({"gammas": {"+1": 0.5}}, "one of its gammas is '+1'"),
        ({"gammas": {"-0": 0.5}}, "one of its gammas is '-0'"),
        ({"gammas": {"0": 1.01}}, "its accuracy for gamma 0 is 1.01; it must be from 0 to 1"),
        ({"gammas": {"0": "1"}}, "its accuracy for gamma 0 is '1'"),
    ],
)
def test_a_description_that_cannot_be_followed_is_refused(
    changes: dict[str, Any], words: str, folder: Path, backbone: VisionInfo
) -> None:
    change_json(folder / TASK, **changes)
    assert words in refusal(folder, backbone)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "a\n"}, r"task 'a\\n': its name is 'a\\n'; it must be at most 64 letters"),
        ({"labels": ("a",)}, r"task 'parity': its labels are \['a'\]; it must list from 2"),
        ({"slo_ms": 0}, "task 'parity': its slo_ms is 0"),
        ({"utility": math.nan}, "task 'parity': its utility is nan"),
    ],
)
def test_what_would_be_refused_later_is_refused_before_training(changes: dict[str, Any], words: str) -> None:
    fine: dict[str, Any] = {"name": "parity", "labels": ("a", "b"), "slo_ms": 1, "utility": 0.5}
    check_description(**fine)
    with pytest.raises(TaskError, match=words):
        check_description(**{**fine, **changes})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "its task.json is not JSON"),
        (b"\xff", "its task.json is not UTF-8"),
        (b"[]", "its task.json holds no JSON object"),
        (b'{"utility": NaN}', "its task.json holds NaN"),
        (b'{"name": "a", "labels": ["a", "b"], "slo_ms": 1e999}', "its slo_ms is inf"),
    ],
)
def test_a_description_that_is_none_is_refused(content: bytes, words: str, folder: Path, backbone: VisionInfo) -> None:
    (folder / TASK).write_bytes(content)
    assert words in refusal(folder, backbone)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("head.weight", np.zeros((2, 23), np.float32), "its head.weight is 2 x 23, where 2 labels on this model of 3"),
        ("head.bias", np.zeros((), np.float32), "its head.bias is one number"),
        ("head.-2.weight", np.zeros((2, 24), np.float32), "it has no head.-2.bias"),
        ("head.2.bias", np.zeros(3, np.float32), "it has no head.2.weight"),
        ("head.3.bias", np.zeros(2, np.float32), "it has a head for gamma 3, but no prompts.3"),
        ("head.0.bias", np.zeros(2, np.float32), "its tensor 'head.0.bias' is unknown"),
        ("prompts.1", np.zeros((3, 2, 24), np.float32), "its prompts.1 is 3 x 2 x 24"),
        ("prompts.2", np.zeros((4, 2, 24), np.float32), "4 x 2 x 24, where 2 labels on this model of 3 layers"),
        ("prompts.0", np.zeros((3, 0, 24), np.float32), "its tensor 'prompts.0' is unknown"),
        ("prompts.-5", np.zeros((3, 5, 24), np.float32), "its tensor 'prompts.-5' is unknown"),
        ("prompts.600", np.zeros((3, 600, 24), np.float32), "from 1 to 512"),
        ("prompts.4", np.zeros((3, 4, 24), np.float32), "it has no accuracy for gamma 4"),
        ("prompts.4", np.zeros((3, 4, 24), np.int64), "stores 'prompts.4' as 'I64'"),
        ("head\n", np.zeros(1, np.float32), "its tensor 'head\\n' is unknown"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, array: np.ndarray[Any, Any], words: str, folder: Path, backbone: VisionInfo
) -> None:
    change_tensors(folder / WEIGHTS, **{name: array})
    assert words in refusal(folder, backbone)


@pytest.mark.parametrize("name", ["head.weight", "head.bias"])
def test_a_task_without_a_head_is_refused(name: str, folder: Path, backbone: VisionInfo) -> None:
    change_tensors(folder / WEIGHTS, without=name)
    assert f"it has no {name}" in refusal(folder, backbone)


def test_images_of_another_size_are_refused(folder: Path, backbone: VisionInfo) -> None:
    save_file({"images": np.zeros((6, 8, 8, 3), np.uint8), "labels": np.zeros(6, np.int64)}, folder / PROFILING)
    assert "holds 'images' of 6 x 8 x 8 x 3, 'labels' of 6 instead of images [n] of 16 x 16 x 3" in refusal(
        folder, backbone
    )
    save_file({}, folder / PROFILING)
    assert "holds nothing instead" in refusal(folder, backbone)


def test_an_incomplete_folder_is_refused(folder: Path, backbone: VisionInfo, tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nowhere", backbone)
    assert "there is no such folder" in refusal(folder / TASK, backbone)
    assert "null byte" in refusal(Path("a\0b"), backbone)
    assert "has no task.json" in refusal(tmp_path, backbone)
    (folder / WEIGHTS).unlink()
    assert "has no task.safetensors; choose" in refusal(folder, backbone)


@pytest.mark.parametrize("name", [TASK, WEIGHTS, PROFILING])
def test_only_plain_files_are_read(name: str, folder: Path, backbone: VisionInfo) -> None:
    (folder / name).rename(folder / "moved")
    (folder / name).symlink_to(folder / "moved")
    assert f"its {name} is a link" in refusal(folder, backbone)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"its {name} is no plain file" in refusal(folder, backbone)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**1100) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def understood(folder: Path, backbone: VisionInfo) -> TaskInfo | None:
    try:
        return read_task(folder, backbone)
    except TaskError:
        refusal(folder, backbone)
        return None


@settings(max_examples=150)
@given(st.data())
def test_a_mangled_description_is_refused_or_understood(
    folder: Path, backbone: VisionInfo, data: st.DataObject
) -> None:
    task_folder(folder, backbone)
    task = json.loads((folder / TASK).read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(task)), min_size=1, max_size=3), "keys"):
        task[key] = data.draw(JSON, key)
    if data.draw(st.booleans(), "one accuracy"):
        task["gammas"] = {"0": 0.5, "1": 0.5, "2": 0.5, data.draw(st.text("-+0123456789.e", max_size=4)): 0.5}
    (folder / TASK).write_text(json.dumps(task))
    if info := understood(folder, backbone):
        assert all(0 <= accuracy <= 1 for accuracy in info.accuracies.values())
        assert {0, *info.prompts} <= info.accuracies.keys()


@settings(max_examples=150)
@given(st.data())
def test_mangled_tensors_are_refused_or_mean_what_safetensors_reads(
    folder: Path, backbone: VisionInfo, data: st.DataObject
) -> None:
    task_folder(folder, backbone, images=6)
    file = data.draw(st.sampled_from([WEIGHTS, PROFILING]), "file")
    content = bytearray((folder / file).read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        content[data.draw(st.integers(0, 7 + length), "at")] = data.draw(st.integers(0, 255), "byte")
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content)), "cut at") :]
    (folder / file).write_bytes(content)
    if info := understood(folder, backbone):
        with safe_open(folder / file, framework="numpy") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        if file == WEIGHTS:
            heads = {gamma: head_names(gamma) for gamma in (0, *info.heads)}
            assert all(shapes[weight] == (len(info.labels), backbone.hidden) for weight, _ in heads.values())
            prompts = {prompts_name(gamma) for gamma in info.prompts}
            assert shapes.keys() == prompts.union(*heads.values())
        else:
            assert shapes["images"] == (info.profiling_images, 16, 16, 3)


def test_a_task_s_bytes_are_those_of_its_tensors(tmp_path: Path, backbone: VisionInfo) -> None:
    info = read_task(task_folder(tmp_path / "task", backbone, prompts=(1, 2), heads=(-4, 2)), backbone)
    tensors = load_file(info.folder / WEIGHTS)
    assert bytes_of(info.ref, backbone) == sum(tensor.nbytes for tensor in tensors.values())
