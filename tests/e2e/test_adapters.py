"""Many LoRA adapters over one tiny model on two replicas, with the `openai` client, against what PEFT answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from support.waiting import HANGS_AFTER_S, wait_until

from e2e.adapter_oracle import FOUND, NAME, RANKS, TOKENS, Oracle
from e2e.cluster import Cluster


class World(NamedTuple):
    """What all tests share: the cluster, and what PEFT would answer."""

    cluster: Cluster
    oracle: Oracle

    def replicas(self) -> dict[str, dict[str, Any]]:
        return self.cluster.stats(NAME)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.cluster.address}/v1/{path}", json=body, timeout=HANGS_AFTER_S)

    def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return self.post("load_lora_adapter", lora_name=name, lora_path=path, base_model_name=NAME, **more)

    def listed(self) -> set[str]:
        return {card["id"] for card in self.cluster.get("/v1/models")["data"]}

    def planner_reached(self) -> bool:
        reached: bool = self.cluster.get("/stats")["planner_reached"]
        return reached

    async def until(self, reached: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_until, reached, self.cluster.progress)


@pytest.fixture
def world(cluster: Cluster, oracle: Oracle) -> World:
    return World(cluster, oracle)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{cluster.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=HANGS_AFTER_S, max_retries=0) as client:
        yield client


def prompt(index: int) -> list[int]:
    """Token ids, of another length for each of several prompts."""
    return [(7 * index + 3 * position) % 250 for position in range(5 + index % 20)]


async def answer(client: openai.AsyncOpenAI, model: str, index: int, tokens: int = TOKENS) -> list[str]:
    """The texts of the tokens of a greedy answer, streamed for every other prompt."""
    request: dict[str, Any] = {"model": model, "prompt": prompt(index), "max_tokens": tokens, "temperature": 0}
    found = await client.completions.create(**request, logprobs=0, stream=bool(index % 2))
    chunks = [chunk async for chunk in found] if index % 2 else [found]
    assert {chunk.model for chunk in chunks} == {model}
    return [text for chunk in chunks for choice in chunk.choices if choice.logprobs for text in choice.logprobs.tokens]


async def test_every_answer_is_that_of_its_adapter_alone(world: World, client: openai.AsyncOpenAI) -> None:
    """32 at once, over 12 adapters and the base model, in memory for about four adapters."""
    models = [[NAME, *FOUND][index % 13] for index in range(32)]
    answers = await asyncio.gather(*(answer(client, model, index) for index, model in enumerate(models)))
    expected = [world.oracle.answer(model, prompt(index)) for index, model in enumerate(models)]
    assert answers == expected
    assert len({tuple(texts) for texts in expected}) == 32
    assert expected[0] != world.oracle.answer(FOUND[0], prompt(0)), "an adapter would show"
    again = await asyncio.gather(*(answer(client, model, 31) for model in FOUND))
    assert again == [world.oracle.answer(model, prompt(31)) for model in FOUND]

    def evicted() -> bool:
        reports = [report["adapters"] for report in world.replicas().values()]
        assert all(report["bytes"] <= 2**20 for report in reports)
        return sum(sum(report["evictions"].values()) for report in reports) > 0

    await world.until(evicted)


async def test_adapters_are_models_with_a_parent(world: World, client: openai.AsyncOpenAI) -> None:
    models = {model.id: model.model_dump() async for model in client.models.list()}
    assert {NAME, *FOUND} <= models.keys()
    for name in FOUND:
        assert (models[name]["parent"], models[name]["root"]) == (NAME, name)
    assert models[NAME]["parent"] is None


async def test_a_load_reaches_both_replicas(world: World, client: openai.AsyncOpenAI) -> None:
    loaded = world.load("spreads", "spreads")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'spreads' added successfully.")
    expected = [world.oracle.answer("spreads", prompt(index)) for index in range(12)]

    def spread() -> bool:
        return all("spreads" in report["adapters"]["resident"] for report in world.replicas().values())

    for _ in range(100):  # one replica answers all of them if it is quick enough
        answers = await asyncio.gather(*(answer(client, "spreads", index % 12) for index in range(48)))
        assert answers == expected * 4
        if spread():
            return
    pytest.fail("one replica has answered all alone")


async def test_what_was_loaded_outlives_planner_and_replicas(world: World, client: openai.AsyncOpenAI) -> None:
    expected = world.oracle.answer("stays", prompt(1), 60)
    assert world.load("stays", str(world.oracle.folder / "more" / "stays")).status_code == 200
    assert world.load("later", "later").status_code == 200
    reading = [asyncio.create_task(answer(client, "stays", 1, 60)) for _ in range(6)]
    [planner] = world.cluster.replica_processes("planner")
    planner.kill()
    world.cluster.replica_processes(NAME)[0].kill()
    assert await answer(client, FOUND[0], 2) == world.oracle.answer(FOUND[0], prompt(2))
    assert await asyncio.gather(*reading) == [expected] * 6
    await world.until(lambda: world.planner_reached() and len(world.replicas()) == 2)
    assert world.post("unload_lora_adapter", lora_name="later").status_code == 200
    with pytest.raises(openai.NotFoundError, match="no 'later'"):
        await answer(client, "later", 2)
    assert world.listed() >= {NAME, "stays", *FOUND}
    assert await asyncio.gather(*(answer(client, "stays", 1, 60) for _ in range(12))) == [expected] * 12


async def test_a_load_goes_on_with_the_next_planner_where_one_stops(world: World, client: openai.AsyncOpenAI) -> None:
    expected = world.oracle.answer("later", prompt(3))
    [stopped] = world.cluster.replica_processes("planner")
    stopped.suspend()
    try:
        assert await answer(client, FOUND[0], 2) == world.oracle.answer(FOUND[0], prompt(2))
        await world.until(lambda: world.load("later", "later", load_inplace=True).status_code == 200)
        assert await answer(client, "later", 3) == expected
    finally:
        stopped.resume()
    assert world.post("unload_lora_adapter", lora_name="later").status_code == 200, "the stopped one is not obeyed"
    with pytest.raises(openai.NotFoundError, match="no 'later'"):
        await answer(client, "later", 3)


def test_errors(world: World) -> None:
    expected = {
        (403, f"lies outside of the folders from which {NAME} loads adapters"): world.load("x", "/etc"),
        (403, "lies outside of the folders"): world.load("x", "../model"),
        (404, "there is no folder 'nothing'"): world.load("x", "nothing"),
        (400, "has no adapter_model.safetensors"): world.load("x", "broken"),
        (400, "is the name of a model"): world.load(NAME, "later"),
        (400, "is loaded already"): world.load(FOUND[0], "later"),
        (404, "no adapter 'nobody'"): world.post("unload_lora_adapter", lora_name="nobody"),
        (404, "there is no 'nobody'; there are: chat, "): world.post(
            "completions", model="nobody", prompt="a", max_tokens=1
        ),
    }
    for (status, text), given in expected.items():
        assert given.status_code == status, given.text
        assert text in given.json()["error"]["message"]


async def test_an_adapter_that_vanishes_is_an_error_of_its_requests_alone(
    world: World, client: openai.AsyncOpenAI
) -> None:
    assert world.load("vanishes", "later").status_code == 200
    weights = world.oracle.folder / "more" / "later" / "adapter_model.safetensors"
    weights.rename(weights.with_suffix(".away"))
    with pytest.raises(openai.InternalServerError, match="vanishes cannot be loaded") as error:
        await answer(client, "vanishes", 2)
    assert error.value.code == "adapter_not_loadable"
    assert await answer(client, FOUND[0], 2) == world.oracle.answer(FOUND[0], prompt(2))
    weights.with_suffix(".away").rename(weights)
    assert await answer(client, "vanishes", 2) == world.oracle.answer("later", prompt(2))


async def test_metrics(world: World, client: openai.AsyncOpenAI) -> None:
    for index, model in enumerate([NAME, *FOUND, *FOUND]):
        await answer(client, model, index, tokens=2)

    def shown() -> bool:
        page = world.cluster.metrics()
        assert f'pliant_adapters_registered{{service="{NAME}"}} ' in page
        return 'pliant_adapter_cache_evictions_total{reason="memory",replica="' in page

    await world.until(shown)

    def reached() -> bool:
        lines = world.cluster.ray_metrics()
        return all(
            any(f"{name}_bucket{{" in line and f'rank="{rank}"' in line for line in lines)
            for name in ("pliant_time_to_first_token_seconds", "pliant_time_per_output_token_seconds")
            for rank in (0, *RANKS)
        )

    await world.until(reached)
