"""What AOTInductor's library is asked for, of a library that only writes it down."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from pliant.kernels import compiled_forward


class Function:
    """One of the library's; ctypes sets its types."""

    argtypes: list[Any]

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return 0


class Library:
    def __init__(self) -> None:
        self.AOTInductorModelContainerCreateWithDevice = Function()
        self.AOTInductorModelContainerRunSingleThreaded = Function()
        self.AOTInductorModelContainerDelete = Function()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "model" / "data"
    folder.mkdir(parents=True)
    (folder / "a.wrapper.so").touch()
    return tmp_path / "model"


def test_compiled_code_runs_on_a_cpu_until_it_is_dropped(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, result = Library(), torch.ones(2)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(compiled_forward, "_to_capsule", lambda *given: None)
    monkeypatch.setattr(compiled_forward._aoti, "alloc_tensor_by_stealing_from_void_ptr", lambda capsule: result)
    forward = compiled_forward.load(package)
    deleted = library.AOTInductorModelContainerDelete.calls
    assert forward(torch.zeros(2)) is result
    (_, containers, on, kernels), (*_, stream, _) = (
        library.AOTInductorModelContainerCreateWithDevice.calls[0],
        library.AOTInductorModelContainerRunSingleThreaded.calls[0],
    )
    assert (containers, on, kernels, stream) == (1, b"cpu", None, None)
    assert not deleted
    del forward
    gc.collect()
    assert len(deleted) == 1, "the weights take no memory any more"
