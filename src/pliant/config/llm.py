"""The config of language models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from pliant.config.base import (
    CatalogConfig,
    ElasticServiceConfig,
    Example,
    Milliseconds,
    ReplicaRange,
    Seconds,
    ServiceConfig,
    folder_or_url,
)
from pliant.errors import ModelError
from pliant.models import sources
from pliant.models.decoder_shape import Quantize

_SHORTEST_SLOT = 128
"""Tokens that a slot must have where nobody says how many."""
EXAMPLE_PROMPT = "The for statement is used to"
"""Of which the zoo's model knows how it goes on."""


class AdaptersConfig(CatalogConfig):
    """The LoRA adapters of a language model (Chameleon).

    Its folder holds a PEFT folder for each adapter; zoo/adapters is one.
    """

    registries: ClassVar[str] = "registries"

    roots: tuple[Annotated[str, AfterValidator(folder_or_url)], ...] = ()
    """Folders, and fsspec URLs such as s3://bucket/adapters, from which others may be loaded at run time."""
    cache: Literal["joint", "compound", "fair_share", "lru", "lfu", "none"] = "joint"
    """By which adapters and prefixes that nobody uses are compared when memory is needed: "joint", by the seconds that
    a byte of them saves; "none": adapters leave at once."""
    prefetch: Literal["queued", "predicted", "none"] = "queued"
    """Load adapters of requests that wait, and, "predicted", of requests that are likely to come."""
    pinned: tuple[str, ...] = ()
    """Adapters of `folder` that never leave the memory."""
    max_rank: Annotated[int, Field(ge=1, le=256)] = 256
    host_mb: Annotated[int, Field(ge=0)] = 0
    """What each replica may keep of the host's memory, beside `memory_mb`, for adapters that it has read: one that is
    loaded again is copied from there and waits for no disk."""

    @model_validator(mode="after")
    def _reachable(self) -> AdaptersConfig:
        if self.folder is None and not self.roots:
            raise ValueError("needs a folder of adapters, or roots from which they may be loaded")
        if self.pinned and self.folder is None:
            raise ValueError("pinned: only adapters of a folder can be pinned; give one")
        return self


class LlmConfig(ElasticServiceConfig):
    """A language model of the Llama family, all of whose requests share one decode loop (Flover)."""

    needs_budget = True

    kind: Literal["llm"]
    replicas: ReplicaRange = ReplicaRange(min=1, max=1)
    slots: Annotated[int, Field(ge=1, le=1024)] = 32
    """Requests that one replica decodes at a time, if there is memory for their keys and values."""
    max_length: Annotated[int, Field(ge=16)] | None = None
    """Tokens of a prompt and its answer together; by default what the model takes, or else what `memory_mb` holds."""
    memory_mb: Annotated[int, Field(ge=1)] | None = None
    """What keys, values and adapters may take together.

    By default keys and values have half of the machine's free memory, or nine tenths of the GPU's, and adapters what
    these leave idle.
    """
    quantize: Quantize | None = None
    """Weights of a byte each, with a scale for each output. int8: on CPUs what they are multiplied by, too, with a
    scale for each token. fp8: on GPUs alone, keys and values too. Answers differ a little.
    """
    tensor_parallel: Literal[1, 2, 4, 8] = 1
    """Processes that compute each replica's model together, every one with a share of the weights, and with `cpus` and
    `gpus` of its own."""
    adapters: AdaptersConfig | None = None
    """LoRA adapters that share the model; each is a model of its own to clients."""
    share_prefixes: bool = False
    """Whether what was computed of one tenant's prompts serves another's that begin alike; a client can find out by the
    time to the first token whether somebody else has sent such a prompt."""
    scheduler: Literal["multi_queue", "fifo", "sjf"] = "multi_queue"
    """Which waiting request is next: of queues by size, the first (as are prompts then), or the one with the shortest
    predicted answer."""
    queue: Annotated[int, Field(ge=0)] = 128
    """Requests that may wait for a slot in each replica; more are refused, with 429."""
    slo_ms: Milliseconds = 10_000
    """Objective for the time to the first token: a request that would miss it is refused early, with 429."""
    timeout_s: Seconds = 60
    """How long an answer may stand still while replicas fail or restart, before it ends with an error."""
    stall_ms: Annotated[float, Field(gt=0)] = 50
    """By how much the prompts of new requests may delay the next token of the others; 16 tokens always may."""
    tpot_ms: Milliseconds | None = None
    """Objective for the time between two tokens of an answer: with one, prompts of new requests may take what answers
    that are ahead of it can spare, instead of `stall_ms`."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Length of an answer whose request does not give one; by default what fits."""
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """How the model writes calls of tools; by default what its chat template shows."""
    reasoning_parser: Literal["think", "none"] | None = None
    """How the model writes its reasoning: between <think> and </think>, or not apart; by default what its chat template
    shows."""
    debug: bool = False
    """Check after every step that slots, pages and requests agree; replaces the replica if they do not. Slow."""

    def least_slot(self, model_takes: int) -> int:
        """Tokens that a slot has at least, for a model that takes `model_takes`."""
        return self.max_length or min(_SHORTEST_SLOT, model_takes)

    @model_validator(mode="after")
    def _patient(self) -> LlmConfig:
        if self.slo_ms > self.timeout_s * 1e3:
            raise ValueError(f"slo_ms must be at most timeout_s ({self.timeout_s:g} s); lower it, or raise timeout_s")
        return self

    def memory_bytes(self) -> int:
        kept = self.adapters.host_mb * 2**20 if self.adapters else 0
        if self.gpus:
            return kept
        weights = sources.check_decoder(self.model).weight_bytes(self.dtype_bytes, self.quantize)
        return kept + (self.memory_mb or 0) * 2**20 + weights

    @property
    def kv_value_bytes(self) -> int:
        """Bytes of one number of keys and values."""
        return 1 if self.quantize == "fp8" else self.dtype_bytes

    @model_validator(mode="after")
    def _quantized_where_it_can_be(self) -> LlmConfig:
        if self.quantize == "fp8" and not self.gpus:
            raise ValueError("quantize: fp8 is for GPUs; set gpus, or use int8 on CPUs")
        if self.quantize == "fp8" and self.dtype != "bfloat16":
            raise ValueError("quantize: fp8 goes with dtype: bfloat16, which GPUs compute in then; set that, too")
        return self

    @model_validator(mode="after")
    def _on_whole_gpus(self) -> LlmConfig:
        if self.tensor_parallel > 1 and self.gpus not in (0, 1):
            raise ValueError(
                f"gpus must be 1, or 0 for CPUs, with tensor_parallel: each of the {self.tensor_parallel} processes "
                f"has one GPU; got {self.gpus:g}"
            )
        return self

    def resources(self) -> dict[str, float]:
        """Of all processes that compute it: one reservation, so that they are on one node."""
        return {name: amount * self.tensor_parallel for name, amount in super().resources().items()}

    def catalogs(self) -> Mapping[str, CatalogConfig]:
        return {"adapters": self.adapters} if self.adapters else {}

    def adapter_names(self) -> list[str]:
        """What the adapters are called that are there from the start. Raises ModelError."""
        return sources.adapter_names(self.adapters.folder) if self.adapters and self.adapters.folder else []

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        shape = sources.check_decoder(self.model)
        if self.adapters and self.adapters.folder:
            try:
                sources.check_adapters(self.adapters.folder)
            except ModelError as error:
                return f"adapters.folder: {error}"
        if self.max_length and self.max_length > shape.max_length:
            return f"max_length: got {self.max_length}; {self.model} takes at most {shape.max_length} tokens"
        try:
            shape.of_rank(self.tensor_parallel)
        except ValueError as error:
            return f"tensor_parallel: got {self.tensor_parallel}; {error}"
        token = shape.kv_bytes(1, self.kv_value_bytes)
        length = self.least_slot(shape.max_length)
        needed_mb = math.ceil(length * token / 2**20)
        if self.memory_mb and needed_mb > self.memory_mb:
            return (
                f"memory_mb: got {self.memory_mb}; a text of {length} tokens x {token / 1024:g} KiB = {needed_mb} MB "
                "of keys and values; allow that much, or a smaller max_length"
            )
        return None

    def example(self, name: str) -> Example:
        return Example("v1/completions", {"model": name, "prompt": EXAMPLE_PROMPT, "max_tokens": 40})
