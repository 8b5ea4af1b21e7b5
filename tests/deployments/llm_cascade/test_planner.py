"""The planner's side of cascades of language models: both answer labelled prompts once, and it is told what serves."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.choosing import entry
from support.scripted import Replica, Replicas, ids, language_model, report, said
from support.waiting import until

from pliant.deployments.kinds import parse
from pliant.deployments.llm.request import Generation
from pliant.deployments.llm_cascade.planner import LlmCascadePart
from pliant.deployments.serving.choosing import part as choosing
from pliant.deployments.serving.kind import Planning
from pliant.sampling import Sampling

pytestmark = pytest.mark.virtual_time

LLM = {"kind": "llm", "model": "m"}
TOKENS = 16
"""Of an answer."""


def answer(prompt: str) -> str:
    """What both models say; they are one and the same."""
    return said(Generation("", ids(prompt), TOKENS, Sampling(temperature=0)))


class House:
    def __init__(self, folder: Path, state: str | None = None, **options: Any) -> None:
        self.data = folder / "prompts.jsonl"
        self.label({})
        cascade = {"kind": "llm-cascade", "levels": ["small", "large"], "data": str(self.data), "loss": 0.05, **options}
        cascade["answer_tokens"] = TOKENS
        self.config = parse({"state": state, "services": {"small": LLM, "large": LLM, "c": cascade}})
        self.replicas = {name: Replicas(a=Replica(), b=Replica()) for name in ("small", "large")}
        for replica in self.replicas["small"].replicas.values():
            replica.logprob = math.log(0.86)
        self.models = {name: language_model(folder, replicas) for name, replicas in self.replicas.items()}
        for name, model in self.models.items():
            model.name = model.fingerprint = name
        self.woken: list[str] = []

    def label(self, answers: dict[int, str], count: int = 300) -> None:
        """Those prompts have these answers, and all others what both models say."""
        lines = [{"prompt": f"p {n}", "answer": answers.get(n, answer(f"p {n}"))} for n in range(count)]
        self.data.write_text("\n".join(map(json.dumps, lines)))

    def start(self) -> LlmCascadePart:
        async def model(name: str) -> Any:
            return self.models[name]

        async def as_they_are(replicas: Any) -> Any:
            return replicas

        tables = {name: replicas.table for name, replicas in self.replicas.items()}
        planning = Planning(self.config, {}, tables, lambda: None, model, 1, as_they_are, self.woken.append)
        return LlmCascadePart(planning, (0.01, 0.02))

    @property
    def calls(self) -> int:
        return sum(len(replicas.asked) for replicas in self.replicas.values())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choosing, "_WAIT_S", 0.001)
    return tmp_path / "cache"


async def test_both_models_answer_once_in_the_background(tmp_path: Path, cache: Path) -> None:
    house = House(tmp_path)
    found = await entry(house.start(), "serves small → large: small answers 100%")
    assert found.choice.rule.sure([math.log(0.86)])
    assert (found.choice.early, found.choice.worse, found.choice.prompts) == (1, 0, 300)
    assert house.calls == 600
    assert all(each.background for replicas in house.replicas.values() for each in replicas.asked)
    assert {*house.woken} == {"small", "large"}
    [kept] = [path for path in (cache / "llm-cascades").iterdir() if path.is_dir()]
    profile = json.loads((kept / "profile.json").read_text())
    assert len(profile["said"]) == 300
    assert len(profile["said"][0]["logprobs"]) == TOKENS
    assert (await entry(house.start(), "serves small → large")).choice == found.choice
    assert house.calls == 600


def say_other_things(house: House) -> None:
    """The small model, from now on."""
    small = house.models["small"]
    encode = small.encode

    async def other(prompt: Any, special: bool = True) -> tuple[int, ...]:
        return (*await encode(prompt, special), 65)

    small.encode = other  # type: ignore[method-assign]


async def test_a_small_model_that_says_other_things_answers_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    say_other_things(house)
    found = await entry(house.start(), "serves large alone: 300 prompts do not show what small may answer")
    assert found.choice.rule is None
    assert not found.refused


async def test_an_answer_is_worse_only_where_the_large_model_is_right(tmp_path: Path) -> None:
    house = House(tmp_path)
    say_other_things(house)
    house.label(dict.fromkeys(range(2, 300), "nobody says so"))
    found = (await entry(house.start(), "serves small → large")).choice
    assert (found.early, found.worse) == (1, 2 / 300)


async def test_too_few_prompts_are_told(tmp_path: Path) -> None:
    house = House(tmp_path, loss=0.01)
    found = await entry(house.start(), "serves large alone")
    assert found.state.endswith(f"; {found.choice.fewest} prompts or more are needed")


async def test_without_answers_the_large_model_is_right(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.data.write_text(
        "\n".join(json.dumps({"messages": [{"role": "user", "content": str(n)}]}) for n in range(300))
    )
    assert (await entry(house.start(), "serves small → large")).choice.worse == 0


async def test_prompts_that_a_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    house = House(tmp_path)
    with house.data.open("a") as file:
        file.write("\n" + json.dumps({"prompt": "long " * 20, "answer": "a"}))
    assert (await entry(house.start(), "serves small → large")).choice.prompts == 300
    lines = [json.dumps({"prompt": f"{number} " + "long " * 20, "answer": "a"}) for number in range(300)]
    house.data.write_text("\n".join(lines))
    found = await entry(house.start(), "cannot use its labelled data")
    assert "300 of 300 prompts are not taken by a model" in found.problem
    assert found.refused


def replicas_report(house: House, **fingerprints: str) -> None:
    for name, fingerprint in fingerprints.items():
        house.replicas[name].table.sync({replica: {**report(), "fingerprint": fingerprint} for replica in ("a", "b")})


async def test_what_an_earlier_version_of_a_model_says_serves_until_it_is_gone_and_is_not_kept(
    tmp_path: Path, cache: Path
) -> None:
    """As in the midst of a deploy."""
    house = House(tmp_path)
    replicas_report(house, small="small of before", large="large")
    part = house.start()
    await entry(part, "serves small → large: small answers 100%")
    await asyncio.sleep(0.1)
    assert house.calls == 600
    assert not (cache / "llm-cascades").exists()
    replicas_report(house, small="small")
    await until(lambda: house.calls == 1200)
    await entry(part, "serves small → large")
    assert len([*(cache / "llm-cascades").glob("*/profile.json")]) == 1


async def test_a_version_that_comes_while_models_are_profiled_is_not_taken_for_theirs(
    tmp_path: Path, cache: Path
) -> None:
    house = House(tmp_path)
    replicas_report(house, small="small", large="large")
    part = house.start()
    await until(lambda: house.calls > 100)
    replicas_report(house, small="small of another deploy")
    found = await entry(part, "could not be profiled yet")
    assert "another version of a model came" in found.problem
    await entry(part, "serves small → large")
    assert not (cache / "llm-cascades").exists()


async def test_other_prompts_are_another_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_LOOK_S", 5.0)
    house = House(tmp_path)
    part = house.start()
    await entry(part, "serves")
    house.data.write_text("{")
    await asyncio.sleep(10)
    assert house.calls == 600
    house.label({}, count=400)
    await asyncio.sleep(30)
    assert part.catalog.entries["c"].choice.prompts == 400


async def test_a_damaged_profile_is_made_again(tmp_path: Path, cache: Path) -> None:
    house = House(tmp_path)
    await entry(house.start(), "serves")
    [kept] = (cache / "llm-cascades").glob("*/profile.json")
    kept.write_text("{}")
    await entry(house.start(), "serves")
    assert house.calls == 1200
    assert len(json.loads(kept.read_text())["said"]) == 300


async def test_models_that_fail_are_tried_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    healthy = dict(house.replicas["large"].replicas)
    failing: Any = {"a": Replica(gives=[RuntimeError("a bug")]), "b": Replica(gives=[RuntimeError("a bug")])}
    house.replicas["large"].replicas = failing
    part = house.start()
    found = await entry(part, "could not be profiled yet")
    assert not found.refused
    house.replicas["large"].replicas = healthy
    await entry(part, "serves small → large")
