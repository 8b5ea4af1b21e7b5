"""The tensors that a model's folder holds: safetensors, in one file or in several."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pliant.errors import ModelError
from pliant.models.hub import INDEX, WEIGHTS, weight_files

Size = tuple[int, ...]

_FLOATS = ("F64", "F32", "F16", "BF16")


class SavedTensors:
    """The tensors in `folder`, by name. Files are mapped, not read: what is never used takes no memory.

    Raises ModelError if the folder holds no safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        """By tensor: the open file that holds it."""
        for file in weight_files(folder):
            if file == folder / WEIGHTS and not file.is_file():
                raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}; save the model as safetensors there")
            try:
                opened: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{file}: cannot be read as safetensors ({error}); download or save it again"
                ) from None
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.names = self._files.keys()

    def __getitem__(self, name: str) -> Tensor:
        """As it is stored; on a CPU its values stay in the file, which other processes may have in memory already."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def problem(self, name: str, size: Size) -> str | None:
        """Why there are no floating-point numbers of that name and size; None if there are."""
        if name not in self._files:
            return f"{name} is missing"
        stored = self._files[name].get_slice(name)
        if (found := tuple(stored.get_shape())) != size:
            return f"{name} is {list(found)} instead of {list(size)}"
        if stored.get_dtype() not in _FLOATS:
            return f"{name} is stored as {stored.get_dtype()} instead of one of {', '.join(_FLOATS)}"
        return None
