"""Where compiled runtimes lie between processes: one folder for each model, length and machine (Arlo §3.1).

Arlo changes a replica's runtime while requests arrive, so that loading must take milliseconds: each runtime is compiled
once per machine, by whichever process asks first. What is only looked for on a CPU imports no torch.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pliant.cache import cache_folder, made_once
from pliant.errors import ModelError
from pliant.kernels.c_compiler import cxx_compiler
from pliant.models import hub
from pliant.models.encoder_info import most_tokens

RECIPE = 3
"""Raised whenever models are compiled in another way, so that older packages are left alone."""

_OF_THE_HEAD = ("architectures", "id2label", "label2id", "num_labels", "problem_type")
_NO_MATTER_OF_SPEED = frozenset((*_OF_THE_HEAD, "_name_or_path", "dtype", "torch_dtype", "transformers_version"))
"""Keys of config.json: the head, which a text meets once, and how weights are stored."""

SHORTEST_DYNAMIC = 2
"""Tokens of the shortest input of a dynamic runtime: torch.export would compile for a length of 1 alone."""


@dataclass(frozen=True)
class RuntimeSpec:
    """What a runtime is compiled for.

    `folder` holds config.json and weights as safetensors; `max_length` counts tokens; `device` is "cpu" or "cuda";
    `dtype` is "float32" or "bfloat16"; `threads` is the number of CPU threads of one forward pass. A `dynamic` runtime
    computes each text at its own length, a static one at `max_length`. With `importance` it gives that of each token
    too. `batch` texts go through it together.
    """

    folder: Path
    max_length: int
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    dynamic: bool = False
    importance: bool = False
    batch: int = 1

    def check(self) -> None:
        """Raise `ModelError` if no runtime can be made for this specification, whatever the machine."""
        if missing := hub.missing(self.folder):
            raise ModelError(
                f"{self.folder / missing[0]} is missing: a classifier's folder holds config.json and model.safetensors"
            )
        if self.device not in ("cpu", "cuda"):
            raise ModelError(f"device {self.device!r} is unknown: choose cpu or cuda")
        if self.dtype not in ("float32", "bfloat16"):
            raise ModelError(f"dtype {self.dtype!r} is unknown: choose float32 or bfloat16")
        if self.batch < 1:
            raise ModelError(f"a runtime for {self.batch} texts cannot be made: choose 1 or more")
        if self.threads < 1:
            raise ModelError(f"{self.threads} threads cannot compute: choose 1 or more")
        longest = most_tokens(json.loads((self.folder / "config.json").read_text())) or sys.maxsize
        shortest = SHORTEST_DYNAMIC + 1 if self.dynamic else 1
        if not shortest <= self.max_length <= longest:
            raise ModelError(
                f"max_length {self.max_length} does not suit {self.folder}: choose {shortest} to {longest} tokens"
            )

    def name(self) -> str:
        """The name of this specification's package on this machine; reads config.json, but no weights."""
        modules = hub.module_files(self.folder)
        tensors = [*hub.weight_files(self.folder), *(file for file in modules if file.suffix != ".json")]
        weights = [(file.resolve(), file.stat()) for file in tensors]
        described = [self.folder / hub.CONFIG, *(file for file in modules if file.suffix == ".json")]
        files = [[str(file), found.st_size, found.st_mtime_ns] for file, found in weights]
        return self._named(self.folder.resolve().name, [files, "".join(file.read_text() for file in described)])

    def shape_name(self) -> str:
        """The name of how fast models of this shape are here, whatever their weights and labels: of another version of
        a model, or of another head on it, nothing is measured again."""
        config = json.loads((self.folder / hub.CONFIG).read_text())
        shape = {key: config[key] for key in sorted(config.keys() - _NO_MATTER_OF_SPEED)}
        return self._named(str(config.get("model_type", "encoder")), [shape])

    def _named(self, name: str, model: list[Any]) -> str:
        what = [self.max_length, self.device, self.dtype, self.threads, self.dynamic, self.importance, self.batch]
        identity = [RECIPE, *model, what, version("torch"), machine(self.device)]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        lengths = f"1to{self.max_length}" if self.dynamic else self.max_length
        return f"{name}-{lengths}-{self.dtype}-{digest[:16]}"


def package_folder(spec: RuntimeSpec) -> Path:
    """Where the package for `spec` lies once it is built."""
    return cache_folder() / "runtimes" / spec.name()


def package(spec: RuntimeSpec, build: Callable[[Path], None]) -> Path:
    """The folder of the package for `spec`, filled by `build(folder)` if no process has built it before.

    What `build` raises is passed on, and nothing is kept.
    """
    return made_once(package_folder(spec), build)


def can_compile(spec: RuntimeSpec) -> bool:
    """Whether a compiled runtime can be had: it has been compiled before, or a C++ compiler is there."""
    return package_folder(spec).exists() or cxx_compiler() is not None


def machine(device: str) -> list[str]:
    """What compiled code depends on besides torch: the instructions this CPU has, and the kind of GPU."""
    instructions = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        instructions = next((line for line in lines if line.startswith(("flags", "Features"))), instructions)
    return [platform.machine(), instructions, device_name(device) if device == "cuda" else ""]


def device_name(device: str) -> str:
    """What the maker of this machine's "cpu" or "cuda" device calls it. Raises PliantError if there is none."""
    if device == "cuda":
        import torch

        from pliant.kernels import gpu_memory

        gpu_memory.must_be_there()
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
