"""An engine on a decoder that two processes compute together: it shares prefixes, and breaks when one of them dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.decoders import greedy, save
from support.scripted_executor import byte_tokenizer
from support.waiting import HANGS_AFTER_S

from pliant.deployments.llm.engine import BrokenError, Engine
from pliant.deployments.llm.request import Generation, Piece
from pliant.kernels.decoder import parallel_executor
from pliant.kernels.decoder.ranks import RankError
from pliant.sampling import Sampling

PREFIX = tuple(number % 97 for number in range(70))


def generation(name: str, prompt: tuple[int, ...]) -> Generation:
    return Generation(name, prompt, max_tokens=6, sampling=Sampling(temperature=0))


def test_prefixes_are_shared_until_a_process_dies(tmp_path: Path) -> None:
    model = save("qwen3", tmp_path)
    run = parallel_executor.load(tmp_path, 2, HANGS_AFTER_S, slots=4)
    engine = Engine(run, byte_tokenizer(), (), queue=8, stall_s=0.002, debug=True)
    for last in range(3):
        engine.add(generation(str(last), (*PREFIX, last)))
        answer: list[int] = []
        while engine.busy:
            for _, item in engine.step():
                assert isinstance(item, Piece), item
                answer += item.tokens
        assert answer == greedy(model, [*PREFIX, last], 6)
    assert engine.report()["memory"]["hit"] > 0

    assert isinstance(run, parallel_executor.ParallelExecutor)
    engine.add(generation("lost", PREFIX))
    os.kill(run._crew._processes[0].pid, signal.SIGKILL)
    items = [item for _ in range(2) for item in engine.step()]
    assert isinstance(engine.failure, RankError)
    [(name, error)] = [(name, item) for name, item in items if isinstance(item, Exception)]
    assert name == "lost"
    assert isinstance(error, BrokenError)
