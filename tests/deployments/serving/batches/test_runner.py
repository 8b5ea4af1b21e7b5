"""Who works on batches: a line that cannot be answered costs that line, and no batch costs another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pliant.deployments.serving.batches.runner import Reply, Runner
from pliant.deployments.serving.batches.store import Batch, BatchStore, Part, Progress
from pliant.deployments.serving.state.storage import FolderStorage

pytestmark = pytest.mark.virtual_time

PATH = "/v1/embeddings"


class House:
    """One gateway's runner. The body of a request says what it is answered with."""

    def __init__(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self.storage = FolderStorage(folder, make=True)
        self.store = BatchStore(self.storage, lambda: 1e9 + loop.time())
        self.asked: list[str] = []
        """Tenants, one for each request."""

    def batch(self, owner: str, *bodies: dict[str, Any]) -> Batch:
        lines = [
            {"custom_id": str(number), "method": "POST", "url": PATH, "body": body}
            for number, body in enumerate(bodies)
        ]
        file = self.store.add_file(owner, "f", "batch", "\n".join(map(json.dumps, lines)).encode())
        return self.store.add_batch(owner, PATH, file.id, len(lines), None).batch

    async def ask(self, owner: str, name: str, path: str, body: Mapping[str, Any]) -> Reply:
        self.asked.append(owner)
        if body.get("breaks"):
            raise KeyError("boom")
        return Reply(body.get("status", 200), {"at": path}, body.get("for_ever", False))

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        runner = Runner(self.store, "gateway")
        task = asyncio.create_task(runner.run())
        runner.begin(self.ask)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def ended(self, batch: Batch) -> Progress:
        async with asyncio.timeout(3600):
            while True:
                if (progress := self.store.progress(batch)).finished:
                    return progress
                await asyncio.sleep(1)

    def lines(self, batch: Batch, file: str | None) -> list[dict[str, Any]]:
        assert file
        return [json.loads(line) for line in self.store.content(batch.owner, file).splitlines()]


@pytest.fixture
async def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def test_a_request_that_breaks_costs_its_line(house: House) -> None:
    batch = house.batch("a", {}, {"breaks": True})
    async with house.working():
        end = await house.ended(batch)
    assert (end.status, end.completed, end.failed) == ("completed", 1, 1)
    assert end.finished
    [line] = house.lines(batch, end.finished.error_file_id)
    assert (line["custom_id"], line["response"], line["error"]["code"]) == ("1", None, "server_error")
    assert "KeyError" in line["error"]["message"]


async def test_a_batch_that_gets_nowhere_holds_up_nobody_else_s(house: House) -> None:
    stuck = house.batch("a", *[{"status": 503}] * 40)
    other = house.batch("b", *[{}] * 40)
    async with house.working():
        assert (await house.ended(other)).completed == 40
        assert not house.store.progress(stuck).finished
        house.store.cancel(stuck)
        assert (await house.ended(stuck)).status == "cancelled"


async def test_a_batch_that_cannot_be_worked_on_holds_up_nobody_else_s(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = house.batch("a", {}), house.batch("b", {})
    read = house.store.parts

    def parts(batch: Batch) -> list[Part]:
        if batch == broken:
            raise ValueError("damaged")
        return read(batch)

    house.store.parts = parts  # type: ignore[method-assign]
    async with house.working():
        assert (await house.ended(other)).completed == 1
        assert f"{broken.id}: failed; trying again" in caplog.text
        house.store.parts = read  # type: ignore[method-assign]
        assert (await house.ended(broken)).completed == 1


async def test_a_tenant_s_batches_come_one_after_the_other(house: House) -> None:
    first = house.batch("a", {"status": 503})
    await asyncio.sleep(1)
    second = house.batch("a", {})
    async with house.working():
        await asyncio.sleep(60)
        assert not house.store.progress(second).finished
        house.store.cancel(first)
        assert (await house.ended(second)).completed == 1


async def test_a_request_that_is_refused_for_ever_is_not_sent_again(house: House) -> None:
    batch = house.batch("a", {"status": 429, "for_ever": True})
    async with house.working():
        end = await house.ended(batch)
    assert (end.status, end.failed, len(house.asked)) == ("completed", 1, 1)
    assert end.finished
    [line] = house.lines(batch, end.finished.error_file_id)
    assert line["response"]["status_code"] == 429


@pytest.mark.parametrize("left", ["", '{"id', '{"response":null}'])
async def test_damaged_answers_are_computed_again(house: House, left: str) -> None:
    batch = house.batch("a", {}, {}, {})
    house.storage.create(f"batches/jobs/{batch.id}/part.{0:08}.3.0", left.encode())
    async with house.working():
        end = await house.ended(batch)
    assert (end.completed, end.failed, len(house.asked)) == (3, 0, 3)


@pytest.mark.parametrize("name", ["finished", "lease.00000003"])
async def test_what_is_damaged_otherwise_is_written_anew(house: House, name: str) -> None:
    batch = house.batch("a", {})
    house.storage.create(f"batches/jobs/{batch.id}/{name}", b'{"gate')
    async with house.working():
        end = await house.ended(batch)
    assert (end.status, end.completed) == ("completed", 1)


async def test_damaged_files_and_batches_cost_nobody_else_theirs(house: House) -> None:
    batch = house.batch("a", {})
    house.storage.create(f"batches/jobs/batch_{0:024x}/batch", b'{"id')
    house.storage.create(f"batches/files/file-{0:024x}", b"")
    assert [each.batch for each in house.store.batches("a")] == [batch]
    assert [each.id for each in house.store.files("a")] == [batch.input_file_id]
    async with house.working():
        assert (await house.ended(batch)).completed == 1


async def test_a_lease_that_was_just_replaced_is_another_gateway_s(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = house.batch("a", {})
    assert house.store.lease(batch, "other")
    names = house.storage.names(f"batches/jobs/{batch.id}")
    assert house.store.lease(batch, "other")
    monkeypatch.setattr(house.storage, "names", lambda _folder: names)
    assert not house.store.lease(batch, "gateway")
