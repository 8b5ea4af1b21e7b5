"""A language model: the engine with the scheduler that is shipped, on an executor that only tells what time it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.bench.pretended import PretendedExecutor
from pliant.bench.tenants.load import Asked, Found, Work
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.decode_admission import BusyError
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.sampling import Sampling

SLO_S = 2.0
"""To the first token; a fifth of the default."""
_SLOTS, _MAX_LENGTH, _QUEUE, _STALL_S = 32, 512, 128, 0.1
"""The defaults of language models, and the longest texts of the default cluster."""
_STEP_S, _ROW_S, _PROMPT_S = 0.008, 0.0002, 0.0002
"""What a step takes, and a row and a token of a prompt more."""
_MODEST, _GREEDY = (32, 32), (255, 256)
"""Tokens of prompt and answer."""


class _Clock:
    """Its time passes when something is computed."""

    now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds


def serve(work: Sequence[Asked]) -> Found:
    """What became of it."""
    clock = _Clock()
    executor = PretendedExecutor(_SLOTS, _MAX_LENGTH, clock.spend, _STEP_S, _ROW_S, _PROMPT_S)
    engine = Engine(
        executor,
        _tokenizer(),
        (),
        _QUEUE,
        _STALL_S,
        clock=lambda: clock.now,
        scheduler=Scheduler(MultiQueue(QueueClasses(SLO_S)), AdapterCache(), executor.arena_bytes, slots=_SLOTS),
    )
    engine.rehearse()
    began = clock.now
    found = Found()
    coming = deque(work)
    sent: dict[str, Asked] = {}
    firsts: dict[str, float] = {}
    ends = began + work[-1].at_s + 2 * SLO_S
    while (coming or engine.busy) and clock.now < ends:
        if not engine.busy:
            clock.now = max(clock.now, began + coming[0].at_s)
        while coming and began + coming[0].at_s <= clock.now:
            asked = coming.popleft()
            name = str(len(sent))
            sent[name] = asked
            found.asked += asked.modest
            try:
                engine.add(_generation(name, asked))
            except BusyError:
                continue
        for name, item in engine.step():
            asked = sent[name]
            if isinstance(item, Piece):
                first_s = firsts.setdefault(name, clock.now - began - asked.at_s)
                if item.finish:
                    found.answered(asked.modest, first_s, SLO_S)
    return found


def _generation(name: str, asked: Asked) -> Generation:
    prompt, answer = _MODEST if asked.modest else _GREEDY
    within_s = SLO_S if asked.modest else None
    return Generation(
        name,
        (int(name), *(0,) * (prompt - 1)),  # no two begin alike
        answer,
        Sampling(),
        ignore_eos=True,
        first_token_within_s=within_s,
        tenant=asked.tenant,
    )


def _work_s(tokens: tuple[int, int]) -> float:
    """Of a request, where all slots are taken."""
    prompt, answer = tokens
    return prompt * _PROMPT_S + answer * (_STEP_S / _SLOTS + _ROW_S)


WORK = Work(_work_s(_MODEST), _work_s(_GREEDY), 1.0)


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
