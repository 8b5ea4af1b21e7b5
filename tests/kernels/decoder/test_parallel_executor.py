"""What becomes of a decoder that several processes compute together when one of them fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.decoders import save
from support.waiting import HANGS_AFTER_S, wait_until

from pliant.errors import ModelError
from pliant.kernels.decoder import crew, parallel_executor
from pliant.kernels.decoder.decode_step import Prefill, Step
from pliant.kernels.decoder.executor import Executor
from pliant.kernels.decoder.ranks import RankError, Ranks
from pliant.kernels.decoder.sampling import Sampling

NONE = np.zeros(0, np.int64)
STEP = Step(
    (Prefill(0, 0, np.arange(4, dtype=np.int32), True, np.ones(1, np.int32)),),
    0,
    NONE.astype(np.int32),
    np.zeros((0, 1), np.int32),
    NONE,
    np.zeros(1, np.int64),
)


def others(run: Executor) -> list[int]:
    assert isinstance(run, parallel_executor.ParallelExecutor)
    return [process.pid for process in run._crew._processes]


def alive(pid: int) -> bool:
    """Not as a zombie, either, of which only its parent knows."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_dead_rank_ends_the_others_and_every_call(tmp_path: Path) -> None:
    save("qwen3-8-heads", tmp_path)
    run = parallel_executor.load(tmp_path, 4, HANGS_AFTER_S, slots=2)
    run.launch(STEP).result()
    ranks = others(run)
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"of 4 ranks that compute the model, .*rank 2 ended with exit code -9"):
        run.launch(STEP)
    assert not any(map(alive, ranks))
    with pytest.raises(RankError, match="rank 2 ended with exit code -9"):
        run.admit(0, Sampling())


def test_a_hung_rank_ends_all_within_the_limit(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    ranks: list[int] = []
    with pytest.raises(RankError, match=r"a rank did not answer within 3 s"):  # noqa: PT012  # a slow machine may hang
        run = parallel_executor.load(tmp_path, 2, 3.0, slots=2)
        ranks = others(run)
        os.kill(ranks[0], signal.SIGSTOP)
        run.launch(STEP)
    assert not any(map(alive, ranks))


def test_ranks_can_meet_as_long_as_there_are_any(tmp_path: Path) -> None:
    """NCCL looks for the others at the first sum, when all have loaded."""
    save("qwen3", tmp_path)
    run = parallel_executor.load(tmp_path, 2, HANGS_AFTER_S, slots=2)
    assert isinstance(run, parallel_executor.ParallelExecutor)
    folder = Path(run._crew._folder.name)
    run.launch(STEP).result()
    assert (folder / "meeting").exists()
    del run
    gc.collect()
    assert not folder.exists()


def test_what_cannot_even_begin_is_the_ranks_failure(tmp_path: Path) -> None:
    """As over NCCL, which looks for the others then."""
    ranks = Ranks(tmp_path / "meeting", 0, 1, 1.0, torch.device("cpu"))
    ranks._group = MeetsNobody()
    with pytest.raises(RankError, match="nobody is there"):
        ranks.add_up(torch.zeros(1))
    with pytest.raises(RankError, match="nobody is there"):
        ranks.side_by_side(torch.zeros(1, 3), 3)


class MeetsNobody:
    def allreduce(self, tensors: object) -> None:
        raise torch.distributed.DistStoreError("nobody is there")

    def gather(self, parts: object, own: object, options: object) -> None:
        raise torch.distributed.DistStoreError("nobody is there")


def test_a_step_that_fails_on_rank_0_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("qwen3", tmp_path)
    run = parallel_executor.load(tmp_path, 2, HANGS_AFTER_S, slots=2)
    monkeypatch.setattr(run._decoder, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.launch(STEP)
    assert not any(map(alive, others(run)))
    with pytest.raises(RankError, match="because a step failed on rank 0"):
        run.launch(STEP)


def test_steps_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    run = parallel_executor.load(tmp_path, 2, HANGS_AFTER_S, slots=2)
    with pytest.raises(ValueError, match="an index for each of 0 rows and 1 prompts that end; got 0 and 0"):
        run.launch(STEP._replace(prefill_indices=NONE))
    assert len(run.launch(STEP).result().first) == 1


def test_ranks_end_with_whoever_started_them(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    program = (
        "import pathlib, time; from pliant.kernels.decoder import parallel_executor\n"
        f"run = parallel_executor.load(pathlib.Path({str(tmp_path)!r}), 2, {HANGS_AFTER_S}, slots=2)\n"
        "print(run._crew._processes[0].pid, flush=True); time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not alive(rank))


def test_models_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    with pytest.raises(
        ValueError, match="4 ranks cannot share 6 heads, 2 key/value heads and an MLP of width 80 evenly"
    ):
        parallel_executor.load(tmp_path, 4, HANGS_AFTER_S)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        parallel_executor.load(tmp_path / "nothing", 2, HANGS_AFTER_S)


@pytest.mark.parametrize("first", ["the rank is heard", "its end is noticed"])
def test_what_keeps_a_rank_from_loading_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    save("qwen3", tmp_path)
    if first == "its end is noticed":
        started: list[subprocess.Popen[bytes]] = []
        start = subprocess.Popen

        def noted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
            started.append(start(*args, **options))
            return started[-1]

        def alone(meeting: Path, rank: int, count: int, limit_s: float, device: torch.device) -> Ranks:
            kept = Ranks(meeting, rank, count, limit_s, device)  # the other may still be joining
            wait_until(lambda: not any(alive(process.pid) for process in started))
            raise RankError(f"the connection of rank {kept.rank} was closed")

        monkeypatch.setattr(crew, "Ranks", alone)
        monkeypatch.setattr(subprocess, "Popen", noted)
    setting = crew.Setting
    monkeypatch.setattr(parallel_executor, "Setting", lambda _, *rest: setting(tmp_path / "gone", *rest))
    with pytest.raises(ModelError, match=r"gone: has no config\.json"):
        parallel_executor.load(tmp_path, 2, HANGS_AFTER_S)
