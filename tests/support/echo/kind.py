"""A toy kind: all that a kind must have, and an example of each other sort of thing that it may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from prometheus_client.core import Metric
from support.echo.config import EchoConfig
from support.echo.replica import EchoReplica

from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Prediction
from pliant.deployments.kinds import Listed
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.courier import each
from pliant.deployments.serving.errand import Errand
from pliant.deployments.serving.kind import Kind, Opening
from pliant.deployments.serving.least_held import Share
from pliant.deployments.serving.metric_table import Described, Table, families, replicas_of
from pliant.deployments.serving.metrics import Requests
from pliant.deployments.serving.outcome import counted
from pliant.deployments.serving.services import Answers, Service

REPLICA: Table = {"served": Described(True, "echo_answers", "Texts that a replica has answered.")}


class EchoErrand(Errand[Share, str, str]):
    def __init__(self, subject: str, text: str, config: EchoConfig) -> None:
        self.subject = subject
        self.timeout_s = config.timeout_s
        self._answer_s = config.answer_s
        self._text = text

    def want(self, late: bool) -> Share:
        return Share(predicted_s=self._answer_s)

    def query(self, late: bool) -> str:
        return self._text


class Echoes:
    """Answers texts with themselves."""

    labels = ("whatever was said",)

    def __init__(self, opening: Opening[EchoConfig], kind: str) -> None:
        self.name = opening.name
        self.longest = 0
        """Characters that were answered."""
        self._config = opening.config
        self._table = opening.table
        self._recorder = Requests(opening.name, kind, opening.outcomes)
        self._caller: Caller[Share, str, str] = opening.caller(self._recorder)

    @property
    def ready(self) -> bool:
        return self._table.ready

    async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
        """As a classifier of texts does."""
        return await each([self._classify(text) for text in texts])

    async def _classify(self, text: str) -> Prediction:
        with counted(self._recorder):
            said, _ = await self._caller.answer(EchoErrand(self.name, text, self._config))
        self.longest = max(self.longest, len(said))
        return Prediction([said], [1.0], None)


class EchoKind(Kind[EchoConfig]):
    config = EchoConfig
    answers: ClassVar[Answers] = "texts"

    async def open(self, opening: Opening[EchoConfig]) -> Echoes:
        return Echoes(opening, self.name)

    def replica(self) -> type:
        return EchoReplica

    def most_ongoing(self, config: EchoConfig) -> int:
        return 64

    def facts(self, service: Service, follower: CatalogFollower[Any] | None) -> Mapping[str, Any]:
        return {"longest": service.endpoint.longest} if service.endpoint else {}

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        return families(REPLICA, replicas_of(services))


KIND = EchoKind()
ECHO: Listed = (EchoConfig, __name__)
"""Its line in `kinds.KINDS`."""
