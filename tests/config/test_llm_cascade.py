"""Cascades of language models in cluster.yaml: what is accepted, and that each mistake is told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pliant.config.cluster import check_models
from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.deployments import kinds
from pliant.errors import ConfigError

CHAT = {"kind": "llm", "model": "zoo/tiny-llama"}
SERVICES = {
    "small": CHAT,
    "large": CHAT,
    "hasty": {**CHAT, "slo_ms": 500},
    "topics": {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1},
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": str(index)}) for index in range(100)))
    return str(file)


def read(file: str, **changes: Any) -> LlmCascadeConfig:
    asked = {"kind": "llm-cascade", "levels": ["small", "large"], "data": file, **changes}
    parsed = kinds.parse({"services": {"asked": asked, **SERVICES}})
    check_models(parsed)
    return parsed.of(LlmCascadeConfig)["asked"]


def test_what_is_accepted(data: str) -> None:
    config = read(data)
    assert (config.small, config.large, config.parts()) == ("small", "large", ("small", "large"))
    assert (config.loss, config.delta, config.answer_tokens, config.slo_ms) == (0.01, 0.05, 64, 1000)
    assert config.example("asked").body["model"] == "asked"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"levels": ["small"]}, "services.asked.levels.1: missing; it must be given"),
        (
            {"levels": ["small", "none"]},
            "levels.1: got none, no service; must be a language model: small, large",
        ),
        ({"levels": ["topics", "large"]}, "levels.0: got topics, encoder; must be a language model"),
        ({"levels": ["large", "large"]}, "levels: got large twice; name a small language model and a large one"),
        ({"levels": ["small", "hasty"]}, "slo_ms: got 1000; hasty, off whose slo_ms it is taken, has 500; lower it"),
        ({"loss": 0}, "services.asked.loss: got 0; input should be greater than 0"),
        ({"data": "/none"}, "data: /none: cannot be read: No such file or directory"),
    ],
)
def test_each_mistake_is_told_in_a_line(data: str, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(data, **changes)
    [told] = error.value.problems
    assert line.lower() in told.lower()
