"""The `openai` client asks the default cluster's route: the adapter answers that has read about it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest
from support.waiting import HANGS_AFTER_S, wait_until

from e2e.cluster import Cluster, runs
from pliant.zoo import library, shapes

NEEDS = ("ask", "library")
ADAPTERS = {shape.part: name for name, shape in shapes.ADAPTERS.items()}
KNOWN = {"asyncio": "StreamReader.readline()", "email": "Message.get_payload()", "logging": "class LogRecord"}
"""Of what these parts of the library have docstrings."""


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    wait_until(lambda: cluster.get("/stats")["services"]["chat"]["adapters"] == len(ADAPTERS), cluster.progress)
    return openai.OpenAI(base_url=f"{cluster.address}/v1", api_key="none", timeout=HANGS_AFTER_S, max_retries=0)


def question(text: str, model: str = "ask") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_completion_tokens": 12, "temperature": 0}


@pytest.mark.parametrize("part", KNOWN)
def test_the_adapter_answers_that_has_read_about_it(client: openai.OpenAI, part: str) -> None:
    text = f"What does {KNOWN[part]} do?"
    answer = client.chat.completions.create(**question(text))
    assert answer.model == ADAPTERS[part]
    direct = client.chat.completions.create(**question(text, ADAPTERS[part]))
    assert answer.choices[0].message.content == direct.choices[0].message.content
    chunks = list(client.chat.completions.create(**question(text), stream=True))
    assert {chunk.model for chunk in chunks} == {ADAPTERS[part]}
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == answer.choices[0].message.content


def test_of_the_language_the_model_has_read_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**question("Explain the for statement."))
    assert (answer.model, "warning" in (answer.model_extra or {})) == ("chat", False)
    assert client.models.retrieve("ask").id in [model.id for model in client.models.list()]


def test_most_questions_that_nobody_has_learned_go_where_they_should(client: openai.OpenAI) -> None:
    asked = library.questions()[::7]
    found = [client.chat.completions.create(**question(text.text)).model for text in asked]
    assert sum(map(str.__eq__, found, [ADAPTERS[text.label] for text in asked])) > 0.7 * len(asked)


def test_each_of_the_three_counts_once(cluster: Cluster, client: openai.OpenAI) -> None:
    def counts() -> Counter[str]:
        views = cluster.get("/stats")["services"]
        return Counter({name: sum(views[name]["requests"].values()) for name in ("ask", "library", "chat")})

    before = counts()
    client.chat.completions.create(**question("Explain the for statement."))
    assert counts() - before == {"ask": 1, "library": 1, "chat": 1}
    assert 'pliant_route_passed_total{model="chat",service="ask"}' in cluster.metrics()


def test_without_its_classifier_it_answers_and_says_so(cluster: Cluster, client: openai.OpenAI) -> None:
    [classifier] = cluster.replica_processes("library")
    classifier.kill()
    wait_until(lambda: not runs(classifier), cluster.progress)

    found: list[tuple[str, str | None]] = []

    def back() -> bool:
        answer = client.chat.completions.create(**question("What does StreamReader.readline() do?"))
        found.append((answer.model, (answer.model_extra or {}).get("warning")))
        return found[-1] == (ADAPTERS["asyncio"], None)

    wait_until(back, cluster.progress)
    assert set(found[:-1]) <= {("chat", "chat answers, as library is down")}
    assert cluster.get("/stats")["services"]["ask"]["requests"].keys() <= {"ok", "degraded"}
