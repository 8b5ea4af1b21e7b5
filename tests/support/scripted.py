"""A language model without a model: replicas that follow a script, and what they say can be told beforehand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.call_path import Played, Recorder
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pliant.config.llm import LlmConfig
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.llm.report import AdapterReport, MemoryReport, PredictorReport
from pliant.deployments.llm.request import Generation, Piece, TokenLogprobs
from pliant.deployments.serving.errors import ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.sampling import Sampling

MAX_LENGTH = 64
TEMPLATE = (
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{%- endif %}"
    "{{ message.role[0] }}:{{ message.content }}{{ eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}a:{%- endif %}"
)


def tokenizer() -> Tokenizer:
    """One token for each byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


TOKENIZER = tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


LETTERS = ids("abcdefghijklmnopqrstuvwxyz")


def token(generation: Generation, index: int) -> int:
    """What the model says: it depends on the prompt, the seed unless it is greedy, and the index alone."""
    seed = 0 if generation.sampling.greedy else generation.sampling.seed
    return LETTERS[(sum(generation.prompt) + seed + index * (index + 3)) % len(LETTERS)]


def said(generation: Generation) -> str:
    tokens = [token(generation, index) for index in range(generation.max_tokens)]
    return str(TOKENIZER.decode(tokens))


def row(chosen: int, alternatives: int, logprob: float = -0.5) -> TokenLogprobs:
    top = tuple(itertools.islice((other for other in range(300) if other != chosen), alternatives))
    return TokenLogprobs(chosen, logprob, top, tuple(-1.0 - rank for rank in range(alternatives)))


@dataclass
class Replica:
    """What it does to each generation."""

    dies_after: int | None = None
    """Tokens until it dies, once and for all."""
    gives: Sequence[Any] | None = None
    """What it yields, or raises, instead of an answer."""
    hangs_after: int | None = None
    waits_s: float = 0.0
    """Before its first token, with signs of life."""
    dead: bool = False
    asked: list[Generation] = field(default_factory=list)
    live: int = 0
    cached: int = 0
    """Tokens of every prompt that it has already."""
    pause_s: float = 0.001
    logprob: float = -0.5
    """Of each token that it chooses."""


class AnswerRecorder(Recorder):
    def arrived(self, prompt_tokens: int) -> None:
        assert prompt_tokens > 0

    def answered(self, seconds: float, first_s: float, prompt_tokens: int, tokens: int, rank: int) -> None:
        assert 0 < first_s <= seconds
        self.events.append(("answered", prompt_tokens, tokens, rank))


class Replicas(Played[Generation, Piece, ReplicaReport, AnswerRecorder]):
    """Replicas of a language model by name, and the way to them."""

    def __init__(self, **replicas: Replica) -> None:
        self.replicas = replicas
        super().__init__(replicas, report, AnswerRecorder())

    @property
    def asked(self) -> list[Generation]:
        """All that they were asked for."""
        return [generation for replica in self.replicas.values() for generation in replica.asked]

    def start(self, name: str, replica: Replica) -> None:
        """It runs now, and no other does."""
        self.replicas[name] = replica
        self.run(name)

    async def pieces(self, parcel: Parcel[Generation]) -> AsyncGenerator[Piece | Refusal | Alive, None]:
        replica, [generation] = self.replicas[parcel.replica], parcel.queries
        if replica.dead:
            raise ReplicaLeftError
        replica.asked.append(generation)
        replica.live += 1
        try:
            if replica.gives is not None:
                for item in replica.gives:
                    await asyncio.sleep(replica.pause_s)
                    if isinstance(item, Exception):
                        raise item
                    yield item
                return
            for _ in range(round(replica.waits_s)):
                await asyncio.sleep(1)
                yield Alive()
            for index in range(len(generation.generated), generation.max_tokens):
                await asyncio.sleep(replica.pause_s)
                if index == replica.hangs_after:
                    await asyncio.Event().wait()
                if index == replica.dies_after or replica.dead:
                    replica.dead = True
                    self.table.lose(parcel.replica)
                    raise ReplicaLostError
                chosen = token(generation, index)
                wanted = generation.sampling.logprobs
                yield Piece(
                    (chosen,),
                    str(TOKENIZER.decode([chosen])),
                    None if wanted is None else (row(chosen, wanted, replica.logprob),),
                    "length" if index + 1 == generation.max_tokens else None,
                    *((replica.pause_s, replica.cached) if index == len(generation.generated) else ()),
                )
        finally:
            replica.live -= 1


def report(**held: float) -> ReplicaReport:
    return ReplicaReport(
        version=0,
        held=held,
        max_length=MAX_LENGTH,
        slots=4,
        live=0,
        waiting=0,
        served=0,
        tokens_per_s=0.0,
        step_ms=0.0,
        prompt_tokens_per_s=0.0,
        squashed=0,
        preempted=0,
        bypassed=0,
        prompts=0,
        prompts_s=0.0,
        tenants={},
        classes=[],
        predictor=PredictorReport(accuracy=0.0, error=0.0),
        digest="",
        memory=MemoryReport(page=4, page_bytes=64, pages=8, live=0, idle=0, hit=0, missed=0, evicted=0),
        adapters=AdapterReport(
            resident=[],
            hottest={},
            bytes=0,
            hits=0,
            misses=0,
            loads=0,
            failed_loads=0,
            load_s=0.0,
            host_hits=0,
            host_bytes=0,
            evictions={},
        ),
    )


def language_model(folder: Path, replicas: Replicas, template: str | None = TEMPLATE, **options: Any) -> LanguageModel:
    TOKENIZER.save(str(folder / "tokenizer.json"))
    info: Any = SimpleNamespace(
        max_length=MAX_LENGTH,
        vocabulary=TOKENIZER.get_vocab_size(),
        chat_template=template,
        special_tokens={"eos_token": "</s>"},
        sampling=Sampling(),
    )
    patience = {"slo_ms": options["timeout_s"] * 1e3} if "timeout_s" in options else {}
    config = LlmConfig(kind="llm", model="m", **{"max_tokens": 8, **patience, **options})
    return LanguageModel("chat", config, folder, info, replicas.table, replicas.caller, replicas.recorder)
