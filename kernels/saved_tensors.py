"""The tensors that a model's folder holds: safetensors, in one file or in several."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pliant.errors import ModelError
from pliant.models.hub import INDEX, WEIGHTS, weight_files

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, ...]

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""By safetensors' name: NumPy's, which has none for bfloat16."""


class SavedTensors:
    """The tensors in `folder`, by name. Files are mapped, not read: what is never used takes no memory.

    torch is imported by whoever asks for tensors of its own. Raises ModelError if the folder holds no safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        """By tensor: the file that holds it."""
        self._opened: dict[tuple[Path, str], Any] = {}
        self._mapped: dict[Path, tuple[dict[str, Any], memoryview]] = {}
        for file in weight_files(folder):
            if file == folder / WEIGHTS and not file.is_file():
                raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}; save the model as safetensors there")
            try:
                names = self._open(file, "np").keys()
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{file}: cannot be read as safetensors ({error}); download or save it again"
                ) from None
            self._files |= dict.fromkeys(names, file)
        self.names = self._files.keys()

    def __getitem__(self, name: str) -> Tensor:
        """As it is stored; on a CPU its values stay in the file, which other processes may have in memory already."""
        tensor: Tensor = self._open(self._files[name], "pt").get_tensor(name)
        return tensor

    def array(self, name: str) -> np.ndarray:
        """In float32; what is stored so stays in the file until it is written to."""
        file = self._files[name]
        if file not in self._mapped:
            self._mapped[file] = _map(file)
        header, values = self._mapped[file]
        stored = header[name]
        first, end = stored["data_offsets"]
        found = np.frombuffer(values[first:end], _FLOATS[stored["dtype"]]).reshape(stored["shape"])
        if stored["dtype"] == "BF16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return np.require(found, np.float32, ["ALIGNED"])

    def problem(self, name: str, size: Size) -> str | None:
        """Why there are no floating-point numbers of that name and size; None if there are."""
        if name not in self._files:
            return f"{name} is missing"
        stored = self._open(self._files[name], "np").get_slice(name)
        if (found := tuple(stored.get_shape())) != size:
            return f"{name} is {list(found)} instead of {list(size)}"
        if stored.get_dtype() not in _FLOATS:
            return f"{name} is stored as {stored.get_dtype()} instead of one of {', '.join(_FLOATS)}"
        return None

    def _open(self, file: Path, framework: str) -> Any:
        if (file, framework) not in self._opened:
            self._opened[file, framework] = safe_open(file, framework=framework)
        return self._opened[file, framework]


def _map(file: Path) -> tuple[dict[str, Any], memoryview]:
    """The header of safetensors that `safe_open` found to be valid, and the values behind it."""
    with file.open("rb") as opened:
        whole = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
    begin = 8 + int.from_bytes(whole[:8], "little")
    return json.loads(bytes(whole[8:begin])), whole[begin:]
