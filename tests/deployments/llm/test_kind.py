"""A language model as a gateway opens it: answers outlive whatever Ray Serve raises of a replica's stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import ActorDiedError
from support.local_serve import Handle
from support.peft_folders import model_folder
from support.scripted import TOKENIZER, Replica, Replicas, ids, said

from pliant.config.cluster import GatewayConfig
from pliant.config.llm import LlmConfig
from pliant.deployments.llm.kind import KIND
from pliant.deployments.llm.request import Generation, merged
from pliant.deployments.serving import metrics
from pliant.deployments.serving.bundles import Bundle, Outboxes, Sending
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.kind import Opening
from pliant.deployments.serving.parcels import Parcel
from pliant.deployments.serving.router import ReplicaCalls
from pliant.sampling import Sampling

GREEDY = Generation("g", ids("hello"), 20, Sampling(temperature=0))

pytestmark = pytest.mark.virtual_time


class Process:
    """A replica's process, over what a test plays; its stream raises `error` after so many pieces."""

    def __init__(self, replicas: Replicas, error: BaseException | None = None, after: int = 0) -> None:
        self._replicas = replicas
        self._error = error
        self._after = after
        self._outboxes: Outboxes[Any] = Outboxes()

    async def send(self, parcel: Parcel[Sending[Generation]]) -> int:
        [sending] = parcel.queries
        return await self._outboxes.send(sending, self._pieces(parcel.instead(sending.query)))

    def bundles(self, parcel: Parcel[str]) -> AsyncGenerator[Bundle[Any], None]:
        return self._outboxes.bundles(*parcel.queries)

    async def _pieces(self, parcel: Parcel[Generation]) -> AsyncGenerator[Any, None]:
        count = 0
        async for piece in self._replicas.pieces(parcel):
            if self._error and count == self._after:
                raise self._error
            yield piece
            count += 1


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        RuntimeError("the replica was killed after the call was sent, and before it said a word"),
        ValueError("a bug"),
    ],
)
async def test_another_replica_goes_on_whatever_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, after: int
) -> None:
    for sort in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, sort, lambda *_, **__: MagicMock())
    folder = Path(model_folder(tmp_path / "model"))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    replicas = Replicas(a=Replica(), b=Replica())
    outcomes: Counter[str] = Counter()

    async def fetch(_: Callable[..., Path]) -> Path:
        return folder

    handle: Any = Handle({"a": Process(replicas, error, after), "b": Process(replicas)})
    opening = Opening(
        "chat",
        LlmConfig(kind="llm", model=str(folder)),
        GatewayConfig(),
        fetch,
        replicas.table,
        ReplicaCalls("chat", handle),
        outcomes,
        Tally(),
        None,
        {},
    )
    model = await KIND.open(opening)
    answer = merged([piece async for piece in model.answer(GREEDY)])
    assert (answer.text, answer.finish) == (said(GREEDY), "length")
    assert [len(asked.generated) for asked in replicas.asked] == [0, after]
    assert outcomes == {"ok": 1}
