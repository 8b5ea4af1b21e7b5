"""What asks services that pass prompts on, by the `openai` protocol, and what they record."""

from __future__ import annotations

import json
from typing import Any

import httpx
from support.call_path import Recorder

from pliant.deployments.http.passing.router import Reason


class PassingRecorder(Recorder):
    def passed(self, model: str) -> None:
        self.events.append(model)

    def instead(self, reason: Reason) -> None:
        self.events.append(reason)

    def took(self, seconds: float) -> None:
        assert seconds >= 0


async def send(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> httpx.Response:
    path = "/completions" if "prompt" in body else "/responses" if "input" in body else "/chat/completions"
    return await http.post(path, json=body, headers=headers)


def events(answer: httpx.Response) -> list[tuple[str, Any]]:
    """The id and content of each event of a stream but the last."""
    assert answer.status_code == 200, answer.text
    found = [dict(line.split(": ", 1) for line in event.split("\n")) for event in answer.text.split("\n\n")[:-2]]
    return [(event["id"], json.loads(event["data"])) for event in found]


def text(parts: list[tuple[str, Any]]) -> str:
    return "".join(data["choices"][0]["delta"].get("content", "") for _, data in parts)
