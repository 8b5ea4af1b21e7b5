"""The `openai` client asks a cascade of two language models: who answers, and who does when that one is away."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest
from support.waiting import HANGS_AFTER_S, wait_until

from e2e.answers import LARGE, NAME, PROMPTS, SMALL
from e2e.cluster import Cluster, runs

NEEDS = (NAME, SMALL, LARGE)


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    def chosen() -> bool:
        return str(cluster.get("/stats")["services"][NAME]["state"]).startswith(f"serves {SMALL} → {LARGE}")

    wait_until(chosen, cluster.progress)
    return openai.OpenAI(base_url=f"{cluster.address}/v1", api_key="none", timeout=HANGS_AFTER_S, max_retries=0)


def prompt(model: str = NAME, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "The for statement is", "max_tokens": 12, "temperature": 0, **more}


def test_the_planner_has_measured_what_the_small_model_may_answer(cluster: Cluster, client: openai.OpenAI) -> None:
    view = cluster.get("/stats")["services"][NAME]
    assert (view["small"], view["large"], view["problem"]) == (SMALL, LARGE, None)
    assert (view["chosen"]["prompts"], view["chosen"]["early"], view["chosen"]["worse"]) == (PROMPTS, 1, 0)


def test_it_answers_as_the_small_model_does(client: openai.OpenAI) -> None:
    answer = client.completions.create(**prompt())
    direct = client.completions.create(**prompt(SMALL))
    assert (answer.model, answer.choices[0].text) == (SMALL, direct.choices[0].text)
    chunks = list(client.completions.create(**prompt(stream=True)))
    assert {chunk.model for chunk in chunks} == {SMALL}
    assert "".join(chunk.choices[0].text for chunk in chunks) == direct.choices[0].text
    several = client.completions.create(**prompt(n=3, temperature=1, seed=5, logprobs=2))
    assert [choice.text for choice in several.choices] == [
        choice.text for choice in client.completions.create(**prompt(SMALL, n=3, temperature=1, seed=5)).choices
    ]


def test_each_answer_counts_once_of_the_cascade(cluster: Cluster, client: openai.OpenAI) -> None:
    def counts() -> Counter[str]:
        views = cluster.get("/stats")["services"]
        return Counter({name: sum(views[name]["requests"].values()) for name in NEEDS})

    before = counts()
    client.completions.create(**prompt())
    assert counts() - before == {NAME: 1, SMALL: 1}, "the answer goes on behind what it begins with"
    before = counts()
    client.completions.create(**prompt(temperature=1, seed=5))
    assert counts() - before == {NAME: 1, SMALL: 2}, "what it begins with is a request of the small model's, too"
    assert f'pliant_route_passed_total{{model="{SMALL}",service="{NAME}"}}' in cluster.metrics()


def test_without_the_small_model_the_large_one_answers(cluster: Cluster, client: openai.OpenAI) -> None:
    small = cluster.replica_processes(SMALL)
    for replica in small:
        replica.kill()
    wait_until(lambda: not any(map(runs, small)), cluster.progress)
    found: list[str] = []

    def back() -> bool:
        found.append(client.completions.create(**prompt()).model)
        return found[-1] == SMALL

    wait_until(back, cluster.progress)
    assert set(found) <= {SMALL, LARGE}
