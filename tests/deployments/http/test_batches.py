"""Files of requests with the real client: answered in the background, line by line, by whichever gateway lives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.scripted import Replica, Replicas, ids, language_model, said
from support.tenants import tenants

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.request import Generation
from pliant.deployments.serving.batches.runner import Runner
from pliant.deployments.serving.batches.store import PART_LINES, BatchStore
from pliant.deployments.serving.services import Services
from pliant.deployments.serving.state.storage import FolderStorage
from pliant.sampling import Sampling

pytestmark = pytest.mark.virtual_time


def line(name: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": "chat", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def lines(count: int) -> list[dict[str, Any]]:
    return [line(f"r{number}", f"p{number}") for number in range(count)]


def jsonl(requests: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(each).encode() for each in requests) + b"\n"


def right(number: int) -> str:
    return said(Generation("", ids(f"p{number}"), 4, Sampling(temperature=0)))


class Gateways:
    """Gateways over one state, one model and one clock."""

    def __init__(self, folder: Path, replicas: Replicas) -> None:
        self._folder = folder
        self._replicas = replicas
        self.ahead_s = 0.0
        """Of the event loop's clock."""
        self.away = False
        """Whether the state cannot be reached."""

    @asynccontextmanager
    async def gateway(self, name: str = "one", runs: bool = True) -> AsyncIterator[Callable[[str], openai.AsyncOpenAI]]:
        """Clients of a gateway, by their key."""
        loop = asyncio.get_running_loop()
        store = BatchStore(Share(self, self._folder / "state"), lambda: 1e9 + loop.time() + self.ahead_s)
        runner = Runner(store, name)
        services = Services.of("prompts", {"chat": language_model(self._folder, self._replicas)})
        config = GatewayConfig()
        app = application(
            config,
            services,
            lambda: {"batches": runner.facts()},
            bytes,
            LlmKind().routers(services, None, config),
            tenants(a={"rights": ["infer", "observe"]}, b={}, c={"rights": ["observe"]}),
            batches=runner,
        )
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        task = asyncio.create_task(runner.run()) if runs else None
        try:
            yield lambda key: openai.AsyncOpenAI(
                api_key=key,
                base_url="http://test/v1",
                http_client=http,  # type: ignore[arg-type]
                max_retries=0,
            )
        finally:
            if task:
                task.cancel()
                await asyncio.wait((task,))


class Share(FolderStorage):
    """A folder that may be away."""

    def __init__(self, gateways: Gateways, root: Path) -> None:
        super().__init__(root, make=True)
        self._gateways = gateways

    def names(self, folder: str) -> list[str]:
        if self._gateways.away:
            raise FileNotFoundError(2, "is no folder")
        return super().names(folder)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(a=Replica())


@pytest.fixture
def gateways(tmp_path: Path, replicas: Replicas) -> Gateways:
    return Gateways(tmp_path, replicas)


async def started(client: openai.AsyncOpenAI, requests: list[dict[str, Any]]) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(requests)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"x": "y"}
    )


async def advanced(client: openai.AsyncOpenAI, count: int) -> Any:
    """A batch of so many lines, some of which are answered."""
    batch = await started(client, lines(count))
    while not batch.request_counts.completed:
        await asyncio.sleep(1)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    while True:
        batch = await client.batches.retrieve(id)
        if batch.status not in ("in_progress", "cancelling"):
            return batch
        await asyncio.sleep(1)


async def content(client: openai.AsyncOpenAI, id: str | None) -> dict[str, Any]:
    assert id
    text = (await client.files.content(id)).text
    return {each["custom_id"]: each["response"] for each in map(json.loads, text.splitlines())}


async def test_a_file_is_answered(gateways: Gateways, replicas: Replicas) -> None:
    count = PART_LINES + 3
    wrong = line("wrong", "p", temperature=9)
    async with gateways.gateway() as connect:
        client = connect("a")
        batch = await started(client, [*lines(count), wrong])
        assert (batch.status, batch.object, batch.metadata) == ("in_progress", "batch", {"x": "y"})
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": count + 1, "completed": count, "failed": 1}
        assert batch.completed_at >= batch.created_at
        good = await content(client, batch.output_file_id)
        assert {name: answer["body"]["choices"][0]["text"] for name, answer in good.items()} == {
            f"r{number}": right(number) for number in range(count)
        }
        bad = await content(client, batch.error_file_id)
        assert bad["wrong"]["status_code"] == 400
        assert bad["wrong"]["body"]["error"]["param"] == "temperature"
        assert all(each.background for each in replicas.asked)
        assert [each.id for each in (await client.batches.list()).data] == [batch.id]
        assert {each.purpose for each in (await client.files.list()).data} == {"batch", "batch_output"}


async def test_another_gateway_goes_on_behind_what_is_answered(gateways: Gateways, replicas: Replicas) -> None:
    count = 3 * PART_LINES
    replicas.replicas["a"].pause_s = 0.5
    async with gateways.gateway("one") as connect:
        batch = await advanced(connect("a"), count)
    before = len(replicas.asked)
    assert batch.request_counts.completed == PART_LINES
    async with gateways.gateway("two") as connect:
        batch = await ended(connect("a"), batch.id)
        assert batch.request_counts.completed == count
        good = await content(connect("a"), batch.output_file_id)
        assert good["r40"]["body"]["choices"][0]["text"] == right(40)
    assert len(good) == count
    assert len(replicas.asked) - before <= count - PART_LINES, "what was stored is not computed again"


async def test_one_gateway_at_a_time_works_on_a_batch(gateways: Gateways, replicas: Replicas) -> None:
    count = 2 * PART_LINES
    replicas.replicas["a"].pause_s = 2.0
    async with gateways.gateway("one") as connect, gateways.gateway("two"):
        batch = await ended(connect("a"), (await started(connect("a"), lines(count))).id)
        assert batch.request_counts.completed == count
    assert len(replicas.asked) == count


async def test_what_is_overloaded_is_asked_again(gateways: Gateways, replicas: Replicas) -> None:
    async with gateways.gateway() as connect:
        replicas.replicas["a"].dead = True
        replicas.table.lose("a")
        batch = await started(connect("a"), lines(1))
        await asyncio.sleep(90)
        replicas.start("b", Replica())
        batch = await ended(connect("a"), batch.id)
        assert batch.request_counts.completed == 1


async def test_cancelled(gateways: Gateways, replicas: Replicas) -> None:
    replicas.replicas["a"].pause_s = 1.0
    async with gateways.gateway() as connect:
        client = connect("a")
        batch = await advanced(client, 3 * PART_LINES)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert (batch.status, batch.cancelled_at is None) == ("cancelled", False)
        assert len(await content(client, batch.output_file_id)) == batch.request_counts.completed > 0
        assert replicas.replicas["a"].live == 0
        with pytest.raises(openai.ConflictError, match="only one that has not ended"):
            await client.batches.cancel(batch.id)


async def test_expired(gateways: Gateways, replicas: Replicas) -> None:
    replicas.replicas["a"].hangs_after = 0
    async with gateways.gateway() as connect:
        batch = await started(connect("a"), lines(1))
        gateways.ahead_s = 24 * 3600
        batch = await ended(connect("a"), batch.id)
        assert (batch.status, batch.output_file_id) == ("expired", None)


async def test_a_file_that_is_deleted_meanwhile(gateways: Gateways) -> None:
    async with gateways.gateway(runs=False) as connect:
        batch = await started(connect("a"), lines(1))
        assert (await connect("a").files.delete(batch.input_file_id)).deleted
    async with gateways.gateway() as connect:
        assert (await ended(connect("a"), batch.id)).status == "failed"


async def test_tenants_have_their_own(gateways: Gateways, replicas: Replicas) -> None:
    async with gateways.gateway() as connect:
        batch = await started(connect("a"), lines(1))
        other, without = connect("b"), connect("c")
        for forbidden in (
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.input_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await forbidden
        assert not (await other.files.list()).data
        assert not (await other.batches.list()).data
        with pytest.raises(openai.PermissionDeniedError):
            await without.files.create(file=("x", jsonl(lines(1))), purpose="batch")
        await ended(connect("a"), batch.id)
        assert {each.tenant.name for each in replicas.asked} == {"a"}


async def test_a_state_that_is_away_is_waited_for(gateways: Gateways) -> None:
    async with gateways.gateway() as connect:
        client = connect("a")
        file = await client.files.create(file=("in.jsonl", jsonl(lines(2))), purpose="batch")
        gateways.away = True
        with pytest.raises(openai.InternalServerError, match="cannot be read or written now") as refused:
            await client.files.list()
        assert refused.value.status_code == 503
        await asyncio.sleep(60)
        gateways.away = False
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert (await ended(client, batch.id)).request_counts.completed == 2


async def test_progress_in_stats(gateways: Gateways, replicas: Replicas) -> None:
    replicas.replicas["a"].pause_s = 2.0
    async with gateways.gateway() as connect:
        client = connect("a")
        batch = await advanced(client, 2 * PART_LINES)
        await asyncio.sleep(4)
        [facts] = (await client.with_options(base_url="http://test").get("/stats", cast_to=dict))["batches"]  # type: ignore[type-var]
        assert facts == {
            "id": batch.id,
            "tenant": "a",
            "status": "in_progress",
            "here": True,
            "total": 2 * PART_LINES,
            "completed": PART_LINES,
            "failed": 0,
        }


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "no requests"),
        ([line("a", "x"), line("a", "y")], "request 2: custom_id: 'a' comes twice"),
        ([line("a", "x"), line("b", [[]] * 70_000)], "request 2: the JSON has more than 262144 values"),
        ([{**line("a", "x"), "url": "/v1/models"}], "request 1: url"),
        ([{**line("a", "x"), "method": "GET"}], "request 1: method"),
        ([{**line("a", "x"), "url": "/v1/embeddings"}], "the batch is for /v1/completions"),
        ([line("a", "x", stream=True)], "body.stream: not in a batch"),
        ([{"custom_id": "a"}], "request 1: method: Field required"),
    ],
)
async def test_files_with_mistakes(gateways: Gateways, requests: list[Any], says: str) -> None:
    async with gateways.gateway() as connect:
        with pytest.raises(openai.BadRequestError, match=says):
            await started(connect("a"), requests)


async def test_bad_requests(gateways: Gateways) -> None:
    async with gateways.gateway() as connect:
        client = connect("a")
        with pytest.raises(openai.BadRequestError, match="purpose: got 'assistants'"):
            await client.files.create(file=("x", jsonl(lines(1))), purpose="assistants")
        for id in ("file-..", "../../x", "batch_" + "0" * 24):
            with pytest.raises(openai.NotFoundError):
                await client.files.content(id)
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve(id)
        with pytest.raises(openai.APIStatusError, match="multipart/form-data") as refused:
            await client.post("/files", body={"file": "x"}, cast_to=object)
        assert refused.value.status_code == 415
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.get("/files?limit=0", cast_to=object)


@pytest.mark.parametrize("metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {f"k{number}": "v" for number in range(17)}])
async def test_metadata_are_bounded(gateways: Gateways, metadata: dict[str, str]) -> None:
    async with gateways.gateway() as connect:
        client = connect("a")
        file = await client.files.create(file=("in.jsonl", jsonl(lines(1))), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="metadata"):
            await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata=metadata
            )
