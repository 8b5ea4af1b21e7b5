"""Registries of tasks over folders of files, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vision_folders import task_folder

from pliant.config.cluster import ServingConfig
from pliant.deployments.kinds import parse
from pliant.deployments.serving.catalog.registry import RejectedError
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.vision.task_registry import TaskRegistry
from pliant.models.vision_info import read_vision


class House:
    """Folders of a model and of tasks, and registries over them, one after another, as the planner's lives."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.backbone = folder, model, read_vision(model)
        self.tasks, self.more, self.kept = folder / "tasks", folder / "more", folder / "kept.json"
        self.tasks.mkdir()
        self.more.mkdir()

    def config(self, services: dict[str, Any] | None = None, **tasks: Any) -> ServingConfig:
        options = {"folder": str(self.tasks), "roots": [str(self.more)], "registry": str(self.kept), **tasks}
        digits = {"kind": "vision", "model": str(self.model), "tasks": options}
        topics = {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}
        return parse({"services": {"digits": digits, "topics": topics, **(services or {})}})

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
