"""Registries of tasks over folders of files, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.vision_folders import task_folder

from pliant.config.cluster import ServingConfig
from pliant.deployments.kinds import parse
from pliant.deployments.serving.catalog.registry import RejectedError
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.record import Record
from pliant.deployments.serving.state.storage import FolderStorage
from pliant.deployments.vision.task_registry import TaskRegistry
from pliant.models.vision_info import read_vision


class House:
    """Folders of a model and of tasks, and registries over them, one after another, as the planner's lives."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.backbone = folder, model, read_vision(model)
        self.tasks, self.more, self.state = folder / "tasks", folder / "more", folder / "state"
        self.tasks.mkdir()
        self.more.mkdir()
        self.state.mkdir()

    def config(self, services: dict[str, Any] | None = None, **tasks: Any) -> ServingConfig:
        options = {"folder": str(self.tasks), "roots": [str(self.more)], **tasks}
        digits = {"kind": "vision", "model": str(self.model), "tasks": options}
        topics = {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}
        return parse({"services": {"digits": digits, "topics": topics, **(services or {})}, "state": str(self.state)})

    def kept(self) -> dict[str, Any]:
        """What is stored now."""
        content = Record(FolderStorage(self.state), "task-registries/digits").look()
        return dict(json.loads(content or "{}"))

    def store(self, content: Any) -> None:
        """Store `content` as a planner of whatever version."""
        record = Record(FolderStorage(self.state), "task-registries/digits")
        record.claim()
        record.write(json.dumps(content).encode())

    async def open(self, services: dict[str, Any] | None = None, **tasks: Any) -> TaskRegistry:
        registry = TaskRegistry(self.config(services, **tasks))
        await registry.started()
        return registry

    def task(self, path: Path, **options: Any) -> Path:
        return task_folder(path, self.backbone, **options)


def names(registry: TaskRegistry) -> list[str]:
    return sorted(registry.catalog.entries)


async def refused(call: Any, match: str) -> Outcome | Fault:
    with pytest.raises(RejectedError, match=match) as error:
        await call
    return error.value.rejected.fault or error.value.rejected.outcome
