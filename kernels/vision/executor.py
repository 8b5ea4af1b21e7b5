"""Runs batches of images through one vision transformer, under the gamma chosen for each batch (OTAS §III-A, §III-B).

A batch may mix tasks: one forward pass serves all rows, each with its own task's prompts, and ends in each task's own
head. Tasks come and go between batches; nothing is compiled for them.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.errors import CannotCompileError, ModelError
from pliant.kernels import triton_cache
from pliant.kernels.vision.model import ImageFeatures, load_model
from pliant.kernels.vision.packages import Forward, VitSpec, build, open_package
from pliant.kernels.vision.tasks import TaskTable, TaskWeights, read_weights
from pliant.kernels.vision.vit import TokenAdaptiveViT
from pliant.models.sources import Progress
from pliant.models.vision_head import Head
from pliant.models.vision_info import VisionInfo

_logger = logging.getLogger("pliant")


class VisionExecutor:
    """A vision transformer and the tasks in memory, computing on the calling thread.

    A run takes at most `most_rows` images. Calls must not overlap, but for `stage`, which any thread may call any time.
    """

    backend: str = "eager"
    """How batches run: "eager", or once `prepare` says so "aoti" (compiled, on CPUs) or "cuda-graph" (recorded); after
    "aoti" it names gammas that could not be compiled."""

    def __init__(self, info: VisionInfo, vit: TokenAdaptiveViT, most_rows: int) -> None:
        self.info = info
        self.most_rows = most_rows
        """May be lowered until gammas are prepared."""
        first = next(vit.parameters())
        self.device, self.dtype = first.device, first.dtype
        self._vit = vit
        self._tasks = TaskTable(info.layers, info.hidden)
        self._forwards: dict[int, Forward] = {}

    def stage(self, folder: Path) -> TaskWeights:
        """The tensors of a task's folder, ready to be added. Slow. Raises TaskError if they cannot be read."""
        return read_weights(folder).to(self.device, self.dtype)

    def own_task(self) -> TaskWeights | None:
        """The model's own head as a task without prompts; None if it has none."""
        head = self._vit.model.head
        if not isinstance(head, torch.nn.Linear):
            return None
        bias = head.weight.new_zeros(head.out_features) if head.bias is None else head.bias
        return TaskWeights({0: Head(head.weight.detach(), bias.detach())}, {})

    def add_task(self, key: str, weights: TaskWeights) -> None:
        """From now on rows may name `key`. Raises ValueError if it is there already or sizes do not fit the model."""
        self._tasks.add(key, weights.to(self.device, self.dtype))

    def remove_task(self, key: str) -> None:
        """No row may name `key` any more. Raises KeyError if it is not there."""
        self._tasks.remove(key)

    def room(self, rows: int) -> NDArray[np.uint8]:
        """Where images of the next run may be laid so that they are copied no more, [rows, height, width, channels]."""
        return np.empty((rows, self.info.height, self.info.width, self.info.channels), np.uint8)

    @torch.inference_mode()
    def run(self, images: NDArray[np.uint8], tasks: Sequence[str], gamma: int) -> list[NDArray[np.float32]]:
        """The logits, float32 [labels of its task], of each of the `images` [n, height, width, channels].

        `tasks` has the key of each row. Any gamma will do for which they have prompts, if it is above 0; those that
        were prepared run faster. Merging takes what there is where -gamma is more than half of a layer's tokens.
        Raises ValueError, and computes nothing, if images have the wrong size or number, or a task is not there or has
        no such prompts.
        """
        self._check(images, tasks)
        self._tasks.check(tasks, gamma)
        prompts = [self._tasks.prompts(tasks, gamma)] if gamma > 0 else []
        return self._tasks.logits(self._forward(gamma)(self._input(images), *prompts), tasks, gamma)

    def prepare(self, gammas: Sequence[int], progress: Progress | None = None) -> None:
        """Make ready what runs these gammas faster than eager code does; all others, and tasks, may still be used."""
        raise NotImplementedError

    def is_prepared(self, gammas: Sequence[int]) -> bool:
        """Whether `prepare` has nothing to compile."""
        return False

    def take_over(self, other: "VisionExecutor") -> None:
        """Run what `other`, of the same model, has prepared. Its tasks stay its own."""
        self._forwards.update(other._forwards)
        self.backend = other.backend

    def computed_rows(self, rows: int) -> int:
        """As how many rows a prepared run of `rows` is computed, which is what it costs."""
        return rows

    def free_bytes(self) -> float:
        """What is left for runs; infinite where that is not known."""
        return math.inf

    def memory_bytes(self, gamma: int, rows: int) -> int:
        """About what a prepared run takes beside weights: its widest layer, similarities, prompts and images."""
        info, tokens = self.info, self.info.tokens + max(0, gamma)
        values = tokens * self._vit.numbers_per_token + max(0, gamma) * info.layers * info.hidden
        if gamma < 0:
            values += tokens * tokens // 4
        pixels = info.height * info.width * info.channels
        each = values * self.dtype.itemsize + pixels * (1 + 2 * torch.float32.itemsize)
        return self.computed_rows(rows) * each

    def _check(self, images: NDArray[np.uint8], tasks: Sequence[str]) -> None:
        info = self.info
        size = (info.height, info.width, info.channels)
        if images.dtype != np.uint8 or images.shape[1:] != size:
            raise ValueError(f"images must be uint8 {['n', *size]}; got {images.dtype} {list(images.shape)}")
        if not 1 <= len(images) <= self.most_rows or len(tasks) != len(images):
            raise ValueError(
                f"a run takes 1 to {self.most_rows} images and a task for each; got {len(images)} and {len(tasks)}"
            )

    def _input(self, images: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(np.require(images, requirements=["C", "W"]))

    def _forward(self, gamma: int) -> Forward:
        if gamma not in self._forwards:
            self._forwards[gamma] = self._features(gamma)
        return self._forwards[gamma]

    def _features(self, gamma: int) -> ImageFeatures:
        return ImageFeatures(self._vit, self.info, gamma)


class CpuExecutor(VisionExecutor):
    """A `VisionExecutor` that runs compiled code, of packages like `spec`."""

    def __init__(self, info: VisionInfo, vit: TokenAdaptiveViT, spec: VitSpec) -> None:
        super().__init__(info, vit, spec.most_rows)
        self._spec = spec

    def is_prepared(self, gammas: Sequence[int]) -> bool:
        return all(replace(self._spec, gamma=gamma).package.exists() for gamma in gammas)

    def prepare(self, gammas: Sequence[int], progress: Progress | None = None) -> None:
        """Load the compiled forward passes of `gammas`; compiled first if that was never done on this machine.

        That takes half a minute each. Where it cannot be done, the "pliant" logger warns, and what it
        fails for stays eager. Compiled code is 1.1 (large models) to 1.7 times (small ones) as fast at gamma 0, and up
        to 2.5 times where tokens are merged.
        """
        specs = [replace(self._spec, gamma=gamma) for gamma in gammas]
        failed = build(specs, progress)
        for spec in specs:
            if spec.gamma not in failed:
                try:
                    self._forwards[spec.gamma] = open_package(spec.package)
                except CannotCompileError as reason:
                    failed[spec.gamma] = str(reason)
        for told in dict.fromkeys(failed.values()):
            _logger.warning(told)
        if len(failed) < len(specs):
            eager = ", ".join(map(str, sorted(failed)))
            self.backend = f"aoti, but eager for gamma {eager}" if failed else "aoti"


def load(
    folder: Path, *, dtype: str = "float32", device: str = "cpu", threads: int = 1, most_rows: int = 64
) -> VisionExecutor:
    """The vision transformer in `folder`, without tasks, for batches of up to `most_rows` images.

    On CPUs this sets the whole process's number of torch threads to `threads`. Raises ModelError, in one line, if there
    is no such model or it cannot be served in this way.
    """
    if device not in ("cpu", "cuda"):
        raise ModelError(f"device {device!r} is unknown: choose cpu or cuda")
    if threads < 1 or most_rows < 2:
        raise ModelError(f"{threads} threads and {most_rows} rows will not do: choose at least 1 thread and 2 rows")
    info, model = load_model(folder, dtype, device)
    if device == "cuda":
        from pliant.kernels.vision.cuda import CudaVisionExecutor

        triton_cache.keep()
        return CudaVisionExecutor(info, TokenAdaptiveViT(model), most_rows)
    torch.set_num_threads(threads)
    return CpuExecutor(info, TokenAdaptiveViT(model), VitSpec(folder, 0, dtype, threads, most_rows))
