"""The benchmark of a file of requests beside live ones."""

from __future__ import annotations

from support.scripted_executor import ScriptedExecutor, byte_tokenizer

from pliant.bench.llm import slack
from pliant.deployments.llm.engine import Engine

SCALE = slack.Scale(requests=12, repetitions=2)


def test_live_requests_are_answered_and_the_file_gets_on_meanwhile() -> None:
    engine = Engine(ScriptedExecutor(slack.SLOTS, slack.LENGTH), byte_tokenizer(), (), SCALE.requests, 0.05)
    calls: list[None] = []
    found = slack.measure(engine, SCALE, 256, lambda: calls.append(None)).figures
    assert [figure.name for figure in found] == [
        "batch_slack_interference",
        "batch_slack_first_token",
        "batch_idle_share_used",
    ]
    interference, first_token, used = (figure.value for figure in found)
    assert interference > 0
    assert first_token > 0
    assert used >= 0
    assert len(calls) == SCALE.runs
