"""What goes between the processes, called ranks, that compute one decoder together: sums, and pieces of logits.

Rank 0 leads. On CPUs they talk over gloo, and on GPUs over NCCL. A rank that ended, or does not answer within a limit,
ends the work of all the others with a RankError; on GPUs, where nobody waits for a launch, whoever waits for its result
sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional

from pliant.errors import PliantError
from pliant.kernels.decoder.weights import share_of

dist: Any = torch.distributed
"""Its types leave out what groups are made with that are not the process's one and only."""


class RankError(PliantError):
    """A rank ended or does not answer: nothing more can be computed."""


class Ranks:
    """Rank `rank` of `count`, which find each other by the file `meeting`, within `limit_s` as in all they do."""

    def __init__(self, meeting: Path, rank: int, count: int, limit_s: float, device: torch.device) -> None:
        self.rank = rank
        self.count = count
        limit = timedelta(seconds=limit_s)
        store = dist.FileStore(str(meeting), count)
        store.set_timeout(limit)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        try:
            self._on_cpu = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, count, options)
            self._group = self._on_cpu
            if device.type == "cuda":
                on_gpus = dist.ProcessGroupNCCL.Options()
                on_gpus._timeout = limit
                self._group = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), rank, count, on_gpus)
        except RuntimeError as error:
            raise RankError(f"the ranks did not find each other: {error}") from None

    def add_up(self, x: Tensor) -> None:
        """Replace `x` by the sum of those of all ranks."""
        self._wait(self._group.allreduce, [x])

    def side_by_side(self, logits: Tensor, vocab: int) -> Tensor:
        """On rank 0 the logits of all `vocab` tokens, [n, vocab]; each rank has its share of them, and gets it back."""
        shares = [share_of(vocab, rank, self.count) for rank in range(self.count)]
        widths = [share.stop - share.start for share in shares]
        padded = functional.pad(logits, (0, max(widths) - logits.shape[1])).contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        if self.rank:
            self._wait(self._group.gather, [], [padded], options)
            return logits
        parts = [torch.empty_like(padded) for _ in widths]
        self._wait(self._group.gather, [parts], [padded], options)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Give another rank a tensor on the CPU, which it waits for."""
        self._wait(self._on_cpu.send, [tensor], rank, 0)

    def receive(self, tensor: Tensor) -> None:
        """Fill `tensor`, on the CPU, with what rank 0 sends."""
        self._wait(self._on_cpu.recv, [tensor], 0, 0)

    def _wait(self, begin: Callable[..., Any], *arguments: Any) -> None:
        try:
            begin(*arguments).wait()
        except RuntimeError as error:
            raise RankError(str(error)) from None
