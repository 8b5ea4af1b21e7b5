"""The config of vision transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from pliant import zoo
from pliant.config.base import (
    CatalogConfig,
    ElasticServiceConfig,
    Example,
    Milliseconds,
    ReplicaRange,
    Seconds,
    ServiceConfig,
    Strict,
)
from pliant.errors import ModelError
from pliant.models import sources
from pliant.models.remote import is_remote

_THREE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAO0lEQVR42gXBARHEMAgAsNwUIAEJSHgpdTYJlYAk5oBPyLuT0NP7g6qzCXIa"
    "qN0OEGdeD+fmF4jdveUP+DgVT58xJ3MAAAAASUVORK5CYII="
)
"""One of scikit-learn's handwritten digits, as PNG in base64."""


class TasksConfig(CatalogConfig):
    """The tasks of a vision service.

    Its folder holds a folder for each task; zoo/digits-tasks is one. Without it the model's own head is the task
    "model", and the one of requests that name none.
    """

    registries: ClassVar[str] = "task-registries"

    @field_validator("roots")
    @classmethod
    def _local(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        if far := next(filter(is_remote, roots), None):
            raise ValueError(f"{far}: tasks are loaded from folders that all nodes see, not from URLs")
        return roots


class BatchingConfig(Strict):
    """Which images wait in the same batch (Algorithm 1): they are close to the one that opened it."""

    delta_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 500
    """By how much they come later at most."""
    eta_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 500
    """By how much their deadlines differ at most."""
    mu: Annotated[float, Field(ge=0)] = 0.8
    """By how much their utilities differ at most."""
    factor: Annotated[float, Field(ge=1)] | None = 2.0
    """How many times the smaller utility the larger one is at most; null: any, as in the paper."""


class Algorithm2Config(Strict):
    """When Algorithm 3 takes the place of Algorithm 2, and what it counts as worth much."""

    beta: Annotated[int, Field(ge=0)] = 5
    """Up to so many waiting batches gamma follows from the rate of requests alone."""
    kappa: Annotated[float, Field(ge=0)] = 0.8
    """Then a batch whose mean utility is above gets the greatest gamma."""


def _ascending(gammas: tuple[int, ...]) -> tuple[int, ...]:
    if len(gammas) > 1 and 0 not in gammas:
        raise ValueError("some tasks may lack prompts, or accuracies, for all of them; add 0, or keep one alone")
    return tuple(sorted(set(gammas)))


def _auto(gammas: object) -> object:
    if not isinstance(gammas, list | tuple) and gammas not in ("auto", None):
        raise ValueError("must be auto, or a list of token counts such as [-4, 0, 2, 8]")
    return None if gammas == "auto" else gammas


class VisionConfig(ElasticServiceConfig):
    """A frozen vision transformer that many tasks share, and that trades tokens for time (OTAS)."""

    kind: Literal["vision"]
    tasks: TasksConfig = TasksConfig()
    """What images are classified for: a head, and prompts for each number of them, per task; or the model's own."""
    needs_budget = True
    replicas: ReplicaRange = ReplicaRange(min=1, max=1)
    gammas: Annotated[
        Annotated[
            tuple[Annotated[int, Field(ge=-1000, le=512)], ...],
            Field(min_length=1, max_length=32),
            AfterValidator(_ascending),
        ]
        | None,
        BeforeValidator(_auto),
    ] = None
    """By how many tokens each layer may differ: prompts above 0, merged ones below. One alone is used always.

    "auto", kept as None: what the model's token count suggests, what the tasks have prompts for, and 0.
    """
    compile: bool = False
    """Compile the model for the CPU, in the background. Replicas answer uncompiled once they have their profile.

    A compile takes half a CPU minute for each gamma of a small model, and minutes and gigabytes for one like ViT-Base;
    it is kept for this machine. Batches of zoo/digits-vit are then 1.3 to 1.9 times as fast, and merging tokens pays,
    which saves such a small model little otherwise. ViT-Base gains a tenth, as its time goes into matrix products:
    merging pays for it in any case. GPUs have no need of this: they record CUDA graphs, in seconds.
    """
    policy: Literal["exact", "algorithm_2"] = "exact"
    """How each batch gets its gamma: so that no other choice earns more, or by the paper's dynamic program."""
    algorithm_2: Algorithm2Config | None = None
    """Settings of that program, the paper's unless given."""
    batching: BatchingConfig = BatchingConfig()
    slo_ms: Milliseconds | None = None
    """Latency objective of requests that give none, instead of their task's own; later answers are worth nothing."""
    utility: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """What a right answer in time is worth if the request does not say so, instead of the task's own."""
    queue: Annotated[int, Field(ge=1, le=4096)] = 256
    """Images that may wait in each replica; more are refused, with 429."""
    timeout_s: Seconds = 30
    """How long an image may stay without an answer where a replica hangs, or its own slo_ms if that is longer; then it
    gets 503. One that reaches no replica gets 503 at its deadline."""

    def catalogs(self) -> Mapping[str, CatalogConfig]:
        return {"tasks": self.tasks}

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        if self.algorithm_2 is not None and self.policy != "algorithm_2":
            return f"algorithm_2: policy {self.policy} does not read it; write policy: algorithm_2, or leave it out"
        labels = sources.check_vision(self.model).labels
        if not self.tasks.folder and not self.tasks.roots:
            if not labels:
                return (
                    "tasks: missing; the model has no head of its own, so give a folder of tasks, or roots to load from"
                )
            if self.gammas and min(self.gammas) > 0:
                return f"gammas: got {self.gammas[0]}; the model's own head, the only task, has no prompts; choose 0"
        if self.tasks.folder:
            try:
                sources.check_tasks(self.tasks.folder)
            except ModelError as error:
                return f"tasks.folder: {error}"
        return None

    def example(self, name: str) -> Example:
        """Names a task of the zoo's folder only; which tasks another folder holds, /stats tells."""
        task = {"task": "digit"} if self.tasks.folder == f"zoo/{zoo.TASKS}" else {}
        return Example(f"models/{name}", {"inputs": _THREE, "parameters": {**task, "top_k": 2}})
