"""Registries of adapters over folders of files, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.peft_folders import model_folder

from pliant.config.cluster import ServingConfig
from pliant.deployments.kinds import parse
from pliant.deployments.llm.adapter_registry import AdapterRegistry
from pliant.deployments.serving.catalog.registry import RejectedError
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.record import Record
from pliant.deployments.serving.state.storage import FolderStorage


class House:
    """Folders of a model and of adapters, and registries over them, one after another, as the planner's lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = model_folder(folder / "model")
        self.adapters = folder / "adapters"
        self.more = folder / "more"
        self.state = folder / "state"
        for made in (self.adapters, self.more, self.state):
            made.mkdir()

    def config(self, services: dict[str, Any] | None = None, **adapters: Any) -> ServingConfig:
        options = {"folder": str(self.adapters), "roots": [str(self.more)], **adapters}
        chat = {"kind": "llm", "model": self.model, "max_length": 64, "adapters": options}
        topics = {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}
        return parse({"services": {"topics": topics, "chat": chat, **(services or {})}, "state": str(self.state)})

    def kept(self, service: str = "chat") -> dict[str, Any]:
        """What is stored now."""
        content = Record(FolderStorage(self.state), f"registries/{service}").look()
        return dict(json.loads(content or "{}"))

    def store(self, content: Any, service: str = "chat") -> None:
        """Store `content` as a planner of whatever version."""
        record = Record(FolderStorage(self.state), f"registries/{service}")
        record.claim()
        record.write(json.dumps(content).encode())

    def spoil(self) -> None:
        """Damage what was stored last."""
        newest = max((self.state / "registries").iterdir())
        newest.write_bytes(newest.read_bytes()[:-1])

    async def open(self, services: dict[str, Any] | None = None, **adapters: Any) -> AdapterRegistry:
        registry = AdapterRegistry(self.config(services, **adapters))
        await registry.started()
        return registry


def names(registry: AdapterRegistry) -> list[str]:
    return sorted(registry.catalog.entries)


async def refused(call: Any, match: str) -> Outcome | Fault:
    with pytest.raises(RejectedError, match=match) as error:
        await call
    return error.value.rejected.fault or error.value.rejected.outcome
