"""A share with files and batches that does not answer is a matter of files and batches alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from support.tenants import tenants

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http import openai_batches
from pliant.deployments.http.application import application
from pliant.deployments.serving.batches.runner import Runner
from pliant.deployments.serving.batches.store import BatchStore
from pliant.deployments.serving.services import Services
from pliant.deployments.serving.state.storage import FolderStorage

REQUESTS = 40
"""More than there are threads for everything else."""


class Share(FolderStorage):
    """Does not answer until it is `back`."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def names(self, folder: str) -> list[str]:
        self.back.wait()
        return []


@pytest.fixture
def share() -> Iterator[Share]:
    share = Share()
    yield share
    share.back.set()


@pytest.fixture
async def http(share: Share) -> AsyncIterator[httpx.AsyncClient]:
    batches = Runner(BatchStore(share), "one")
    app = application(GatewayConfig(), Services([]), dict, bytes, tenants=tenants(), batches=batches)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pliant") as client:
        yield client


async def test_other_threads_are_free(http: httpx.AsyncClient, share: Share) -> None:
    waiting = [asyncio.create_task(http.get("/v1/files")) for _ in range(REQUESTS)]
    await asyncio.sleep(0.1)
    try:
        async with asyncio.timeout(30):
            await asyncio.to_thread(int)
    finally:
        share.back.set()
    assert {(await each).status_code for each in waiting} == {200}


async def test_clients_hear_of_it(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_batches, "_STORED_WITHIN_S", 0.01)
    answers = await asyncio.gather(*(http.get("/v1/batches") for _ in range(REQUESTS)))
    assert {answer.status_code for answer in answers} == {503}
    assert "the state does not answer" in answers[0].json()["error"]["message"]
    assert answers[0].headers["Retry-After"] == "5"
