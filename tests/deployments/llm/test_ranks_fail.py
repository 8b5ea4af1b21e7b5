"""A rank dies or stops amid an answer: its replica ends, and the answer goes on elsewhere as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from support.call_path import Played
from support.decoders import greedy, save
from support.scripted import AnswerRecorder, report
from support.scripted_executor import byte_tokenizer
from support.waiting import HANGS_AFTER_S, until

from pliant.config.llm import LlmConfig
from pliant.deployments.llm.assembly import assemble
from pliant.deployments.llm.errand import AnswerErrand
from pliant.deployments.llm.loop import EngineLoop
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.llm.precedence import Precedence
from pliant.deployments.llm.replica import LlmReplica
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.serving.replica import Held
from pliant.kernels.decoder.decode_step import Step
from pliant.kernels.decoder.parallel_executor import ParallelExecutor
from pliant.kernels.decoder.ranks import RankError
from pliant.sampling import Sampling

PROMPT, TOKENS = (5, 17, 3, 29, 71, 8), 60
BEFORE = 20
"""Steps that the ranks compute well."""
LIMIT_S = 10.0
"""Within which a rank that stopped is noticed."""


class Service(Played[Generation, Piece, ReplicaReport, AnswerRecorder]):
    """Real replicas, in this process, of one service."""

    def __init__(self, **replicas: LlmReplica) -> None:
        self._replicas = replicas
        self.asked: dict[str, Generation] = {}
        super().__init__(replicas, report, AnswerRecorder())

    async def pieces(self, parcel: Parcel[Generation]) -> AsyncGenerator[Piece | Refusal | Alive, None]:
        [self.asked[parcel.replica]] = parcel.queries
        async for item in self._replicas[parcel.replica].generate(parcel):
            yield item


def replica(loop: EngineLoop) -> LlmReplica:
    """Without Ray, which is what its constructor needs."""
    made: Any = LlmReplica.__new__(LlmReplica)
    made._service, made._held, made._loop, made._hangs_after_s = "chat", Held(), loop, HANGS_AFTER_S
    made._precedence = Precedence(loop.generate)
    return made  # type: ignore[no-any-return]


def ails(executor: ParallelExecutor, how: signal.Signals) -> int:
    """Have the other rank get a signal before step `BEFORE`; its process's id."""
    [process] = executor._crew._processes
    launch, steps = executor.launch, 0

    def counted(step: Step) -> Any:
        nonlocal steps
        steps += 1
        if steps == BEFORE:
            os.kill(process.pid, how)
        return launch(step)

    executor.launch = counted  # type: ignore[method-assign]
    return process.pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_answer_goes_on_elsewhere(tmp_path: Path, how: signal.Signals) -> None:
    model = save("qwen3", tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = LlmConfig(kind="llm", model=str(tmp_path), slots=4, tensor_parallel=2, timeout_s=2 * LIMIT_S)
    shared = await asyncio.to_thread(assemble, config)
    alone = await asyncio.to_thread(assemble, config.model_copy(update={"tensor_parallel": 1}))
    assert isinstance(shared._executor, ParallelExecutor)
    rank = ails(shared._executor, how)
    loops = {"shared": EngineLoop(shared), "alone": EngineLoop(alone)}
    replicas = {name: replica(loop) for name, loop in loops.items()}
    try:
        service = Service(**replicas)
        service.run("shared")
        errand = AnswerErrand(
            Generation("g", PROMPT, TOKENS, Sampling(temperature=0), ignore_eos=True),
            "chat", HANGS_AFTER_S, HANGS_AFTER_S,
        )  # fmt: skip
        tokens: list[int] = []
        async for piece in service.caller.stream(errand):
            service.run("shared", "alone")
            tokens += piece.tokens
        assert tokens == greedy(model, [*PROMPT], TOKENS)
        assert len(service.asked["alone"].generated) >= BEFORE // 2, "it goes on with what the client has"
        await until(lambda: loops["shared"].failure)
        with pytest.raises(RankError, match="of 2 ranks that compute the model, "):
            await replicas["shared"].check_health()
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
        await replicas["alone"].check_health()
    finally:
        for loop in loops.values():
            loop.close()
