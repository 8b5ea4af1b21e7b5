"""The `openai` client over one scripted language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
from support.scripted import Replica, Replicas, ids, language_model

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.request import Piece
from pliant.deployments.serving.services import Services


def saying(text: str, finish: Any = "stop") -> Replicas:
    """A model that says `text` to whatever it is asked, three characters at a time."""
    pieces = [Piece(ids(text[at : at + 3]), text[at : at + 3]) for at in range(0, len(text), 3)]
    pieces[-1] = pieces[-1]._replace(finish=finish)
    return Replicas(a=Replica(gives=pieces))


def connect(folder: Path, replicas: Replicas, **options: Any) -> openai.AsyncOpenAI:
    """A client of the service `chat` with `options`."""
    services = Services.of("prompts", {"chat": language_model(folder, replicas, **options)})
    config = GatewayConfig()
    app = application(config, services, dict, bytes, LlmKind().routers(services, None, config))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http, max_retries=0)
