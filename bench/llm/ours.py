"""Our engine, driven directly, without Ray (Flover §V)."""

from __future__ import annotations

from tokenizers import Tokenizer

from pliant.bench.llm.our_kernels import GREEDY
from pliant.bench.llm.outcome import Outcome, Recorder
from pliant.bench.llm.workload import Request, Workload
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece
from pliant.formats.adapter_info import AdapterRef
from pliant.kernels.decoder.executor import Executor
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.passes import Order
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues
from pliant.policies.llm.request_scheduler import Scheduler

STALL_S = 0.05
"""The default of `stall_ms`."""
SLO_S = 10.0
"""That of `slo_ms`."""
_QUEUE = 1024


class Fused:
    """Our engine, with the scheduler that ships: every request joins the next iteration, and leaves when it is done.

    `compact` False is the paper's ablation, buffers that are never shuffled (§V-D). With a `stall_s` that is never
    reached prompts are not cut into chunks. With `order` "fifo" they are computed one after another, as they came.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        compact: bool = True,
        stall_s: float = STALL_S,
        order: Order = "shortest",
    ) -> None:
        queues: Queues[Answer, AdapterRef] = Fifo() if order == "fifo" else MultiQueue(QueueClasses(SLO_S))
        scheduler = Scheduler(queues, AdapterCache("none"), executor.arena_bytes, slots=executor.slots)
        self._engine = Engine(
            executor, tokenizer, (), _QUEUE, stall_s, compact=compact, scheduler=scheduler, order=order
        )

    def run(self, workload: Workload) -> Outcome:
        engine = self._engine
        engine.forget()
        recorder = Recorder(threads=1)
        sent = done = 0
        while done < len(workload):
            while sent < len(workload) and workload[sent].at_s <= recorder.now():
                engine.add(_generation(sent, workload[sent]))
                sent += 1
            if not engine.busy:
                recorder.wait_until(workload[sent].at_s)
                continue
            pieces = [(int(name), _whole(piece)) for name, piece in engine.step()]
            recorder.note_all((index, len(piece.tokens)) for index, piece in pieces)
            recorder.passes += 1
            done += sum(piece.finish is not None for _, piece in pieces)
        return recorder.outcome(workload)


def _generation(index: int, request: Request) -> Generation:
    return Generation(
        id=str(index),
        prompt=tuple(request.prompt.tolist()),
        max_tokens=request.tokens,
        sampling=GREEDY,
        ignore_eos=True,
        first_token_within_s=None,
    )


def _whole(piece: Piece | Exception) -> Piece:
    """The piece, or its error raised."""
    if isinstance(piece, Exception):
        raise piece
    return piece
