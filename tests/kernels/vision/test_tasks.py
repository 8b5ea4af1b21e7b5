"""Tasks' tensors as they are read from folders that may change meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.vision_folders import change_tensors, task_folder, vision_folder

from pliant.formats.vision_task import WEIGHTS, TaskError, head_names
from pliant.kernels.vision.tasks import TaskWeights, read_weights
from pliant.models.adapter_files import TensorFile
from pliant.models.vision_head import Head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task of two labels with prompts for 1 and 2 and heads for -2, 0 and 1, for 3 layers of 24 numbers."""
    info = vision_folder(tmp_path / "model")
    return task_folder(tmp_path / "task", info, heads=(-2, 1))


def refusal(folder: Path) -> str:
    with pytest.raises(TaskError) as caught:
        read_weights(folder)
    said = str(caught.value)
    assert said.isprintable()
    assert said.startswith(f"task {folder}: its {WEIGHTS} ")
    assert said.endswith("; train the task again")
    return said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_as_they_were_saved(dtype: torch.dtype, folder: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    weights = read_weights(folder)
    assert sorted(weights.heads) == [-2, 0, 1]
    for gamma, head in weights.heads.items():
        assert all(map(torch.equal, head, (tensors[name] for name in head_names(gamma))))
    assert sorted(weights.prompts) == [1, 2]
    for gamma, prompts in weights.prompts.items():
        assert prompts.dtype == dtype
        assert torch.equal(prompts, tensors[f"prompts.{gamma}"])


def test_what_was_read_outlives_the_file(folder: Path) -> None:
    weights: TaskWeights = read_weights(folder)
    before = weights.heads[0].weight.clone()
    (folder / WEIGHTS).write_bytes(b"")
    assert torch.equal(weights.heads[0].weight, before)


def test_a_gamma_without_a_head_has_the_nearest_on_its_side_of_0() -> None:
    heads = {gamma: Head(torch.full((2, 3), float(gamma)), torch.zeros(2)) for gamma in (0, -4, -10, 2)}
    weights = TaskWeights(heads, {})
    wanted = {0: 0, -1: 0, -2: 0, -3: -4, -7: -4, -8: -10, -30: -10, 1: 0, 2: 2, 8: 2}
    assert {gamma: int(weights.head(gamma).weight[0, 0]) for gamma in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("head.weight", np.zeros(2, np.float32), "has 'head.weight' as [2], which should have 2 dimensions"),
        ("head.bias", np.zeros((0,), np.float32), "has 'head.bias' as [0]"),
        ("head.bias", np.full(2, np.nan, np.float32), "holds numbers that are not finite"),
        ("head.1.bias", np.full(2, np.nan, np.float32), "holds numbers that are not finite"),
        ("head.-2.weight", np.zeros(2, np.float32), "has 'head.-2.weight' as [2], which should have 2 dimensions"),
        ("prompts.2", np.full((3, 2, 24), np.inf, np.float16), "holds numbers that are not finite"),
        ("prompts.2", np.zeros((3, 4, 24), np.float32), "has 'prompts.2' of 4 tokens a layer"),
        ("prompts.4", np.zeros((3, 24), np.float32), "has 'prompts.4' as [3, 24]"),
        ("other\n", np.zeros((3, 4, 24), np.float32), "has 'other\\n' of 4 tokens a layer"),
        ("prompts.2", np.zeros((3, 2, 24), np.int32), "stores 'prompts.2' as 'I32'; choose one of F64"),
        ("prompts.2", np.zeros((1, 3, 2, 24), np.float32), "what is no size of a tensor"),
    ],
)
def test_other_tensors_are_refused(name: str, array: np.ndarray[Any, Any], words: str, folder: Path) -> None:
    change_tensors(folder / WEIGHTS, **{name: array})
    assert words in refusal(folder)


@pytest.mark.parametrize("name", ["head.weight", "head.bias", "head.-2.weight", "head.1.bias"])
def test_a_head_must_be_there(name: str, folder: Path) -> None:
    change_tensors(folder / WEIGHTS, without=name)
    assert f"has no '{name}'" in refusal(folder)


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("moved")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (link, "is a link; put what it leads to there"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is no plain file"),
        (lambda file: file.unlink(), "cannot be opened: No such file"),
        (lambda file: file.write_bytes(b"not tensors"), "is cut off"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "is it cut off?"),
    ],
)
def test_what_is_no_file_of_tensors_is_refused(change: Callable[[Path], None], words: str, folder: Path) -> None:
    change(folder / WEIGHTS)
    assert words in refusal(folder)


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the end of the process, as it would be if the file were mapped."""
    read = TensorFile.read

    def cut_off(file: TensorFile, name: str) -> bytearray:
        os.truncate(folder / WEIGHTS, 600)
        return read(file, name)

    monkeypatch.setattr(TensorFile, "read", cut_off)
    assert "was cut off at byte" in refusal(folder)


@settings(max_examples=100)
@given(st.data())
def test_mangled_files_are_refused_or_read(folder: Path, data: st.DataObject) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    content, length = bytearray(whole), int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        content[data.draw(st.integers(0, 7 + length), "at")] = data.draw(st.integers(0, 255), "byte")
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content)), "cut at") :]
    (folder / WEIGHTS).write_bytes(content)
    try:
        weights = read_weights(folder)
    except TaskError:
        refusal(folder)
    else:
        assert weights.head.ndim == 2
        assert all(prompts.shape[1] == gamma for gamma, prompts in weights.prompts.items())
    finally:
        (folder / WEIGHTS).write_bytes(whole)
