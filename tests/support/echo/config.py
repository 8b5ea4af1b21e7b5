"""A toy service's keys in cluster.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pliant.config.base import Example, ReplicaCount, ReplicaRange, Seconds, ServiceConfig


class EchoConfig(ServiceConfig):
    """Answers a text with itself."""

    kind: Literal["echo"]
    replicas: ReplicaRange | ReplicaCount = 1
    cpus: Annotated[float, Field(ge=0)] = 0
    """CPUs that each replica reserves in Ray."""
    timeout_s: Seconds = 30
    answer_s: Seconds | None = None
    """Within which an answer is predicted."""

    def example(self, name: str) -> Example:
        return Example(f"models/{name}", {"inputs": "hello"})

    def replica_range(self) -> ReplicaRange:
        return ReplicaRange.model_validate(self.replicas)

    def resources(self) -> dict[str, float]:
        return {"num_cpus": self.cpus}
