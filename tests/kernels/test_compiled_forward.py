"""What AOTInductor's library is asked for on a GPU, of a library that only writes it down."""

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


class Stream:
    cuda_stream = 1234


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_code_gets_its_kernels_and_the_current_stream(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "model" / "data"
    folder.mkdir(parents=True)
    (folder / "a.wrapper.so").touch()
    library, result = Library(), torch.ones(2)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(compiled_forward, "_to_capsule", lambda *given: None)
    monkeypatch.setattr(compiled_forward._aoti, "alloc_tensor_by_stealing_from_void_ptr", lambda capsule: result)
    forward = compiled_forward.load(tmp_path / "model", device)
    deleted = library.AOTInductorModelContainerDelete.calls
    assert forward(torch.zeros(2)) is result
    (_, containers, on, kernels), (*_, stream, _) = (
        library.AOTInductorModelContainerCreateWithDevice.calls[0],
        library.AOTInductorModelContainerRunSingleThreaded.calls[0],
    )
    assert (containers, on) == (1, device.encode())
    assert (kernels, stream) == ((None, None) if device == "cpu" else (str(folder).encode(), Stream.cuda_stream))
    assert not deleted
    del forward
    gc.collect()
    assert len(deleted) == 1, "the weights take no memory any more"
