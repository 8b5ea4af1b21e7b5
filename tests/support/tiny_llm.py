"""A tiny language model that is computed, by engines in this process, behind the HTTP application of a gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import openai
from fastapi import FastAPI
from support import decoders
from support.call_path import Played
from support.scripted import TEMPLATE, TOKENIZER, AnswerRecorder, report

from pliant.config.cluster import GatewayConfig
from pliant.config.llm import LlmConfig
from pliant.deployments.http.application import application
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.loop import EngineLoop
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving.errors import ReplicaLostError
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.serving.services import Services
from pliant.kernels.decoder import executor
from pliant.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_LENGTH = 512
EOS = TOKENIZER.get_vocab_size() - 1


def save(folder: Path) -> PreTrainedModel:
    """A random llama of the scripted model's tokens, and its tokenizer."""
    TOKENIZER.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": TOKENIZER.get_vocab_size(), "max_position_embeddings": MAX_LENGTH}
    return decoders.save("llama3", folder, sizes=sizes)


class TinyLlm(Played[Generation, Piece, ReplicaReport, AnswerRecorder]):
    """What `save` left in `folder`, on replicas of these names. To be made in an event loop, and closed."""

    def __init__(self, folder: Path, names: Iterable[str] = ("a",)) -> None:
        self._folder = folder
        self._loops = {name: self._loop() for name in names}
        self.asked: list[Generation] = []
        self.dies_after: int | None = None
        """Pieces of the next answer, without its last, after which its replica dies."""
        super().__init__(self._loops, lambda: {**report(), "max_length": MAX_LENGTH}, AnswerRecorder())

    def _loop(self) -> EngineLoop:
        run = executor.load(self._folder, slots=4)
        return EngineLoop(Engine(run, TOKENIZER, (EOS,), queue=64, stall_s=0.002, debug=True))

    async def pieces(self, parcel: Parcel[Generation]) -> AsyncGenerator[Piece | Refusal | Alive, None]:
        [generation] = parcel.queries
        self.asked.append(generation)
        left, self.dies_after = self.dies_after, None
        async with aclosing(self._loops[parcel.replica].generate(generation)) as pieces:
            async for piece in pieces:
                if piece and left is not None:
                    if not left or piece.finish:
                        self.table.lose(parcel.replica)
                        raise ReplicaLostError
                    left -= 1
                yield piece or Alive()

    def app(self, **options: Any) -> FastAPI:
        """A gateway with the service `chat`, which has these `options`."""
        info: Any = SimpleNamespace(
            max_length=MAX_LENGTH,
            vocabulary=TOKENIZER.get_vocab_size(),
            chat_template=options.pop("template", TEMPLATE),
            special_tokens={"eos_token": "</s>"},
            sampling=Sampling(),
        )
        config = LlmConfig(kind="llm", model="m", **options)
        model = LanguageModel("chat", config, self._folder, info, self.table, self.caller, self.recorder)
        services, gateway = Services.of("prompts", {"chat": model}), GatewayConfig()
        return application(gateway, services, dict, bytes, LlmKind().routers(services, None, gateway))

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app(**options)))
        return openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http, max_retries=0)

    def close(self) -> None:
        for loop in self._loops.values():
            loop.close()
