"""Packages are built once, appear whole, and are told apart by everything that they depend on."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pliant.kernels.runtime_cache import RuntimeSpec, package


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RuntimeSpec:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache folder"))
    folder = tmp_path / "a model.v1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return RuntimeSpec(folder, 8)


def test_two_processes_build_once(spec: RuntimeSpec, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from pliant.kernels.runtime_cache import RuntimeSpec, package

folder, log, me, other = map(Path, sys.argv[1:])

def build(into):
    with log.open("a") as file:
        file.write("built\\n")
    while not other.exists():
        time.sleep(0.01)
    (into / "library").write_text("code")

me.touch()
print((package(RuntimeSpec(folder, 8), build) / "library").read_text())
"""
    command, files = [sys.executable, "-c", code, spec.folder, tmp_path / "log"], (tmp_path / "a", tmp_path / "b")
    processes = [
        subprocess.Popen([*command, *pair], stdout=subprocess.PIPE, text=True) for pair in (files, reversed(files))
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["code", "code"]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_failed_build_is_passed_on_and_forgotten(spec: RuntimeSpec) -> None:
    def fail(into: Path) -> None:
        (into / "half").touch()
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        package(spec, fail)
    built = package(spec, lambda into: (into / "whole").touch())
    assert sorted(path.name for path in built.iterdir()) == [".made.json", "whole"]
    assert package(spec, fail) == built


def test_what_a_killed_build_left_is_cleared(spec: RuntimeSpec) -> None:
    built = package(spec, lambda into: (into / "whole").touch())
    built.rename(f"{built}.unfinished")
    assert [path.name for path in package(spec, lambda into: None).iterdir()] == [".made.json"]


def test_names_tell_packages_apart(spec: RuntimeSpec) -> None:
    changes = {"max_length": 9, "dtype": "bfloat16", "threads": 2, "dynamic": True}
    names = [spec.name(), *(dataclasses.replace(spec, **{field: value}).name() for field, value in changes.items())]
    (spec.folder / "model.safetensors").write_bytes(b"other weights")
    names.append(spec.name())
    (spec.folder / "config.json").write_text('{"num_labels": 2}')
    names.append(spec.name())
    assert len(set(names)) == len(names)
    assert spec.name() == names[-1]


def test_models_that_share_weights_are_told_apart_by_what_is_made_of_their_states(spec: RuntimeSpec) -> None:
    names = [spec.name()]
    pooling = spec.folder / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    for file, content in ((spec.folder / "modules.json", "[]"), (pooling, "{}"), (pooling, '{"pooling_mode": "cls"}')):
        file.write_text(content)
        names.append(spec.name())
    (spec.folder / "2_Dense").mkdir()
    (spec.folder / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    names.append(spec.name())
    assert len(set(names)) == 5


def test_speeds_are_those_of_all_models_of_a_shape(spec: RuntimeSpec, tmp_path: Path) -> None:
    other = tmp_path / "the next version"
    other.mkdir()
    for folder, config in ((spec.folder, {"id2label": {"0": "a"}}), (other, {"architectures": ["B"], "dtype": "x"})):
        content = {"model_type": "bert", "hidden_size": 8, **config}
        (folder / "config.json").write_text(json.dumps(content))
    same = dataclasses.replace(spec, folder=other)
    assert spec.shape_name() == same.shape_name()
    assert spec.shape_name().startswith("bert-8-float32-")
    changes = {"max_length": 9, "dtype": "bfloat16", "threads": 2, "dynamic": True}
    names = {dataclasses.replace(spec, **{field: value}).shape_name() for field, value in changes.items()}
    (other / "config.json").write_text('{"model_type": "bert", "hidden_size": 9}')
    assert len({spec.shape_name(), same.shape_name()} | names) == 6
