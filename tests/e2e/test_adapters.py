"""Many LoRA adapters over one tiny model on two replicas, with the `openai` client, against what PEFT answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch
from e2e.cluster import Cluster, serving
from scripted import TOKENIZER

from pliant.config import IMPORT_PATH
from pliant.deployments.gateway.token_texts import TokenTexts
from pliant.lora_layout import MODULES
from pliant.torchvision_mend import mend

RANKS = (8, 16, 32, 64)
FOUND = [f"tenant-{index}" for index in range(12)]
"""Adapters of the configured folder. Memory holds about four of them."""
MORE = ["later", "stays", "spreads"]
"""Adapters that are loaded at run time."""
TOKENS = 24
TEXTS = TokenTexts(TOKENIZER)


class World(NamedTuple):
    """What all tests share: the cluster, its files, and what PEFT would answer."""

    cluster: Cluster
    folder: Path
    oracle: Oracle

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.cluster.address}{path}", timeout=10).raise_for_status().json()

    def replicas(self) -> dict[str, dict[str, Any]]:
        replicas: dict[str, dict[str, Any]] = self.get("/stats")["language_models"]["chat"]["replicas"]
        return replicas

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.cluster.address}/v1/{path}", json=body, timeout=60)

    def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return self.post("load_lora_adapter", lora_name=name, lora_path=path, **more)

    def listed(self) -> set[str]:
        return {card["id"] for card in self.get("/v1/models")["data"]}


class Oracle:
    """A random Llama, saved in `folder`, and what transformers and PEFT answer with it."""

    def __init__(self, folder: Path) -> None:
        mend()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=TOKENIZER.get_vocab_size(),
            max_position_embeddings=96,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        self.folder = folder
        self._adapted: Any = None
        self._model = LlamaForCausalLM(config).eval()
        self._model.save_pretrained(folder)
        TOKENIZER.save(str(folder / "tokenizer.json"))

    def adapt(self, name: str, folder: Path, rank: int, seed: int) -> None:
        """Save a random adapter of all modules in `folder`, and know what `name` answers."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=16, target_modules=list(MODULES), task_type="CAUSAL_LM")
        if self._adapted is None:
            self._adapted = get_peft_model(self._model, config, adapter_name=name)
        else:
            self._adapted.add_adapter(name, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self._adapted.modules():
                if name in getattr(module, "lora_A", ()):
                    a, b = module.lora_A[name].weight, module.lora_B[name].weight
                    a.copy_(torch.randn(a.shape, generator=generator))
                    b.copy_(torch.randn(b.shape, generator=generator) / (15 * module.scaling[name] * rank**0.5))
        self._adapted.save_pretrained(folder.parent, selected_adapters=[name])

    @torch.inference_mode()
    def answer(self, name: str, prompt: list[int], tokens: int = TOKENS) -> list[str]:
        """The texts of the tokens that greedy decoding gives; alone, without our kernels."""
        if name == "chat":
            with self._adapted.disable_adapter():
                return self._generate(prompt, tokens)
        self._adapted.set_adapter(name)
        return self._generate(prompt, tokens)

    def _generate(self, prompt: list[int], tokens: int) -> list[str]:
        ids = torch.tensor([prompt])
        found = self._adapted.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        return [TEXTS[token].text for token in found[0, len(prompt) :].tolist()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny, and the cluster needs the cores
    oracle = Oracle(folder / "model")
    for index, name in enumerate([*FOUND, *MORE]):
        parent = folder / ("found" if name in FOUND else "more")
        oracle.adapt(name, parent / name, RANKS[index % len(RANKS)], seed=index)
    broken = folder / "more" / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8')
    chat = {
        "kind": "llm",
        "model": str(oracle.folder),
        "replicas": 2,
        "slots": 8,
        "memory_mb": 1,
        "cpus": 0.25,
        "debug": True,
        "adapters": {
            "folder": str(folder / "found"),
            "roots": [str(folder / "more")],
            "registry": str(folder / "registry.json"),
        },
    }
    args = {"gateway": {"cpus": 0.25}, "services": {"chat": chat}}
    content = {"applications": [{"name": "pliant", "import_path": IMPORT_PATH, "args": args}]}
    with serving(content, folder) as cluster:
        yield World(cluster, folder, oracle)
    torch.set_num_threads(threads)


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{world.cluster.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
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


async def until(reached: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not await asyncio.to_thread(_safely, reached):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def _safely(reached: Callable[[], bool]) -> bool:
    try:
        return reached()
    except httpx.HTTPError:
        return False


async def test_every_answer_is_that_of_its_adapter_alone(world: World, client: openai.AsyncOpenAI) -> None:
    """32 at once, over 12 adapters and the base model, in memory for about four adapters."""
    models = [["chat", *FOUND][index % 13] for index in range(32)]
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

    await until(evicted, within_s=10)


async def test_adapters_are_models_with_a_parent(world: World, client: openai.AsyncOpenAI) -> None:
    models = {model.id: model.model_dump() async for model in client.models.list()}
    assert {"chat", *FOUND} <= models.keys()
    for name in FOUND:
        assert (models[name]["parent"], models[name]["root"]) == ("chat", str(world.folder / "found" / name))
    assert models["chat"]["parent"] is None


async def test_a_load_reaches_both_replicas(world: World, client: openai.AsyncOpenAI) -> None:
    loaded = world.load("spreads", "spreads")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'spreads' added successfully.")
    answers = await asyncio.gather(*(answer(client, "spreads", index) for index in range(12)))
    assert answers == [world.oracle.answer("spreads", prompt(index)) for index in range(12)]
    await until(lambda: all("spreads" in report["adapters"]["resident"] for report in world.replicas().values()), 10)


async def test_what_was_loaded_outlives_planner_and_replicas(world: World, client: openai.AsyncOpenAI) -> None:
    expected = world.oracle.answer("stays", prompt(1), 60)
    assert world.load("stays", str(world.folder / "more" / "stays")).status_code == 200
    assert world.load("later", "later").status_code == 200
    reading = [asyncio.create_task(answer(client, "stays", 1, 60)) for _ in range(6)]
    [planner] = world.cluster.replica_processes("planner")
    planner.kill()
    world.cluster.replica_processes("chat")[0].kill()
    assert await answer(client, FOUND[0], 2) == world.oracle.answer(FOUND[0], prompt(2))
    assert await asyncio.gather(*reading) == [expected] * 6
    await until(lambda: world.get("/stats")["adapters"]["planner_reached"] and len(world.replicas()) == 2)
    assert world.post("unload_lora_adapter", lora_name="later").status_code == 200
    with pytest.raises(openai.NotFoundError, match="no 'later'"):
        await answer(client, "later", 2)
    assert world.listed() >= {"chat", "stays", *FOUND}
    assert await asyncio.gather(*(answer(client, "stays", 1, 60) for _ in range(12))) == [expected] * 12


def test_errors(world: World) -> None:
    expected = {
        (403, "lies outside of the folders from which chat loads adapters"): world.load("x", "/etc"),
        (403, "lies outside of the folders"): world.load("x", "../model"),
        (404, "there is no folder 'nothing'"): world.load("x", "nothing"),
        (400, "has no adapter_model.safetensors"): world.load("x", "broken"),
        (400, "is the name of a model"): world.load("chat", "later"),
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
    weights = world.folder / "more" / "later" / "adapter_model.safetensors"
    weights.rename(weights.with_suffix(".away"))
    with pytest.raises(openai.InternalServerError, match="vanishes cannot be loaded") as error:
        await answer(client, "vanishes", 2)
    assert error.value.code == "adapter_not_loadable"
    assert await answer(client, FOUND[0], 2) == world.oracle.answer(FOUND[0], prompt(2))
    weights.with_suffix(".away").rename(weights)
    assert await answer(client, "vanishes", 2) == world.oracle.answer("later", prompt(2))


async def test_metrics(world: World, client: openai.AsyncOpenAI) -> None:
    for index, model in enumerate(["chat", *FOUND, *FOUND]):
        await answer(client, model, index, tokens=2)

    def shown() -> bool:
        page = httpx.get(f"{world.cluster.address}/metrics", timeout=10).text
        assert 'pliant_adapters_registered{service="chat"} ' in page
        return 'pliant_adapter_cache_evictions_total{reason="memory",replica="' in page

    await until(shown)
    port = next(world.cluster.ray_folder.glob("ray/session_latest/metrics_export_port_*")).read_text()

    def reached() -> bool:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines()
        return all(
            any(f"{name}_bucket{{" in line and f'rank="{rank}"' in line for line in lines)
            for name in ("pliant_time_to_first_token_seconds", "pliant_time_per_output_token_seconds")
            for rank in (0, *RANKS)
        )

    await until(reached)
