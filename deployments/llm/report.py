"""What an engine reports about itself."""

from __future__ import annotations

from typing import TypedDict


class ClassReport(TypedDict):
    """One queue of the scheduler. Counts without "waiting" are since the start."""

    cut_off: float | None
    """The largest weighted size of its requests; None for any."""
    quota: int
    """Bytes that its requests may borrow together."""
    waiting: int
    admitted: int
    waited_s: float
    """Seconds that those admitted have waited, together."""


class PredictorReport(TypedDict):
    """How well the lengths of answers are predicted, of late."""

    accuracy: float
    """The share of answers whose length is of the class that was predicted."""
    error: float
    """Mean of |predicted - real| / real."""


class AdapterReport(TypedDict):
    """What became of adapters' weights; counts are since the start."""

    resident: list[str]
    """Names of those that are in memory."""
    hottest: dict[str, int]
    """The names of those that were used most often in the last five minutes, a dozen at most, and how often."""
    bytes: int
    """Of those and of those that are being loaded."""
    hits: int
    """Requests whose adapter was in memory when they came."""
    misses: int
    loads: int
    failed_loads: int
    load_s: float
    """Seconds that all loads took, together."""
    host_hits: int
    """Loads from the host's memory."""
    host_bytes: int
    """What it holds of adapters, whether they are on the device, too, or not."""
    evictions: dict[str, int]
    """By reason: "memory", "unused"."""


class MemoryReport(TypedDict):
    """What pages hold; counts of tokens and evictions are since the start."""

    page: int
    """Tokens that one holds."""
    page_bytes: int
    pages: int
    """That there are, if adapters leave room for all."""
    live: int
    """Those that requests have."""
    idle: int
    """Those with prefixes that nobody uses at the moment."""
    hit: int
    """Tokens of prompts that were there already."""
    missed: int
    """Those that had to be computed."""
    evicted: int
    """Pages of prefixes."""


class WaitingReport(TypedDict):
    """What gateways hear of those that wait, and of who was let in. Counts without "waiting" are since the start."""

    waiting: int
    """Requests that wait for a slot."""
    squashed: int
    """Requests that were put back: they outlived what was predicted when they passed others."""
    preempted: int
    """Requests that were put back: memory was short, and others had come before them."""
    bypassed: int
    """Requests that passed others that waited for memory."""
    tenants: dict[str, float]
    """Tokens of prompts and answers that wait, by tenant, as these are charged for them."""
    classes: list[ClassReport]
    """The queues, small requests first."""
    predictor: PredictorReport


class EngineReport(WaitingReport):
    """What gateways hear of an engine. Counts are of now, speeds of late."""

    max_length: int
    """Tokens that a slot has: a prompt and its answer together."""
    slots: int
    live: int
    """Requests that have a slot."""
    tokens_per_s: float
    """Of answers, in a second of computing."""
    step_ms: float
    """A decode step without prompts."""
    prompt_tokens_per_s: float
    prompts: int
    """That were computed, since the start."""
    prompts_s: float
    """Seconds from getting a slot to the first token, of all of these together."""
    memory: MemoryReport
    digest: str
    """Names of prefixes that are there, as `chooser` reads them: where they end or branch, the latest used."""
    adapters: AdapterReport


class LlmReport(EngineReport):
    """With what only its replica hears."""

    live_tokens: int
    """That all requests, live and waiting, may come to hold, prompts and answers together."""
    served: int
    """Answers that came to their end."""
    tokens: int
    """Of answers, computed since the start."""
    answer_ratio: float
    """Tokens of answers to the most that they might have had."""
