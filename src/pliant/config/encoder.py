"""The config of encoders: what labels texts or their tokens, and what makes vectors of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pliant.config.base import ElasticServiceConfig, Example, Milliseconds, Seconds, ServiceConfig, Strict
from pliant.models import sources

EXAMPLE_TEXT = "The yield expression is used when defining a generator function"
EXAMPLE_QUERY = "How is a generator defined?"


def _rising(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if list(lengths) != sorted(set(lengths)):
        raise ValueError("lengths must rise, each once")
    return lengths


def _auto(lengths: object) -> object:
    if not isinstance(lengths, list | tuple) and lengths not in ("auto", None):
        raise ValueError("must be auto, or a list of lengths such as [64, 128, 512]")
    return None if lengths == "auto" else lengths


def _dispatch(rule: object) -> object:
    if rule is None or rule == "finish":
        return None
    if isinstance(rule, dict | Arlo):
        return rule
    if rule != "arlo":
        raise ValueError("must be finish, arlo, or its numbers such as {threshold: 0.85, decay: 0.9, peek: 6}")
    return {}


class Arlo(Strict):
    """The numbers of the paper's Algorithm 1, which it calls lambda, alpha and L."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.85
    """The share of what a replica can do within the SLO from which on it is congested."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.9
    """By which the threshold shrinks from length to length."""
    peek: Annotated[int, Field(ge=1)] = 6
    """The most lengths that are looked at."""


class EncoderConfig(ElasticServiceConfig):
    """An encoder, whose replicas are shared out by input length (Arlo); its model's folder says what it is for."""

    needs_budget = False

    kind: Literal["encoder"]
    lengths: Annotated[
        Annotated[tuple[Annotated[int, Field(ge=4)], ...], Field(min_length=1), AfterValidator(_rising)] | None,
        BeforeValidator(_auto),
    ] = None
    """Input lengths in tokens at which replicas are at home; the last is the longest text that is served.

    "auto", kept as None: chosen from the device's latency profile and the lengths that arrive, up to what the model
    takes.
    """
    residency: Literal["all", "one", "several"] = "all"
    """Whether a replica computes texts of all lengths, or those of one length only, as in the paper; or holds as many
    static runtimes, of a length each, as its memory has room for."""
    memory_mb: Annotated[int, Field(ge=1)] | None = None
    """What these may take of each replica's memory, with weights. By default nine tenths of what is free of a GPU's; on
    CPUs half of what is free in the machine, shared by as many replicas as there may be."""
    dispatch: Annotated[Arlo | None, BeforeValidator(_dispatch)] = None
    """The numbers of the paper's Algorithm 1; None: to the replica that is predicted to finish first."""
    slo_ms: Milliseconds = 500
    """Latency objective, measured in the gateway: a request that would miss it is refused at once, with 429."""
    timeout_s: Seconds = 30
    """How long a request may be kept alive while replicas fail or restart, before it gets 503."""
    truncate: bool = False
    """Cut texts that are too long, with a warning in the answer, instead of refusing them."""
    period_s: Annotated[float, Field(ge=10, le=3600)] = 120
    """How often the planner allocates lengths to replicas anew; it does so at once when demand shifts."""
    demand_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Plan for this quantile of the demand, second by second, instead of its mean."""
    importance: bool = False
    """Tell which tokens of a text are important, for a cascade that prunes; on wherever one needs it."""

    exits: bool = False
    """Let texts leave after the layers for which the model's folder has exits, where these are sure enough."""
    exit_levels: bool = False
    """Have exits read the texts of cascades that name them as levels; on wherever one does."""

    @model_validator(mode="after")
    def _memory_is_for_several(self) -> Self:
        if self.memory_mb and self.residency != "several":
            raise ValueError(f"memory_mb is for residency: several; got {self.residency}")
        return self

    @property
    def with_exits(self) -> bool:
        """Whether its replicas compute exits at all."""
        return self.exits or self.exit_levels

    @property
    def by_length(self) -> bool:
        """Whether replicas hold runtimes of a length each, where these are worth it."""
        return self.residency != "all"

    def longest(self, model_takes: int) -> int:
        """The longest text that is served, in tokens, for a model that takes `model_takes`."""
        return self.lengths[-1] if self.lengths else model_takes

    def of_a_replica(self) -> dict[str, Any]:
        told = super().of_a_replica()
        shares_memory = self.residency == "several" and self.memory_mb is None and self.device == "cpu"
        return told | {"shared_by": self.replicas.max} if shares_memory else told

    def memory_bytes(self) -> int:
        return 0 if self.device == "cuda" else (self.memory_mb or 0) * 2**20

    def labels(self, services: Mapping[str, ServiceConfig]) -> tuple[str, ...]:
        info = sources.check(self.model)
        return info.labels if info.chooses else ()

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        info = sources.check(self.model)
        longest = self.longest(info.max_length)
        if longest > info.max_length:
            return f"lengths: got {longest}; {self.model} takes at most {info.max_length} tokens"
        if self.importance and info.task != "classify":
            return f"importance: only what labels texts tells which tokens are important; {self.model} does not"
        return self._misfit_of_exits() if self.with_exits else None

    def _misfit_of_exits(self) -> str | None:
        if self.by_length:
            only = "exits: texts leave early only where a replica computes all lengths"
            return f"{only}; leave residency: {self.residency} out"
        sources.check_exits(self.model)
        return None

    def example(self, name: str) -> Example:
        info = sources.check(self.model)
        if info.task == "embed":
            return Example("v1/embeddings", {"model": name, "input": EXAMPLE_TEXT})
        if info.task == "tokens":
            options: dict[str, object] = {"aggregation_strategy": "simple"}
            return Example(f"models/{name}", {"inputs": EXAMPLE_TEXT, "parameters": options})
        if info.scores_pairs:
            return Example("rerank", {"model": name, "query": EXAMPLE_QUERY, "documents": [EXAMPLE_TEXT]})
        return Example(f"models/{name}", {"inputs": EXAMPLE_TEXT, "parameters": {"top_k": 2}})
