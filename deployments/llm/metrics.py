"""What a language model counts."""

from __future__ import annotations

from collections import Counter

from pliant.deployments.llm import metric_tables as llm
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.metrics import LATENCY_S, Followed, Requests, counter, histogram

_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0]


class AnswerMetrics(Requests):
    """As a gateway sees it; an `endpoint.LlmRecorder`. `rank` is that of the request's adapter, 0 without one.

    The planner hears of it, too, by `tally`.
    """

    def __init__(self, service: str, kind: str, outcomes: Counter[str], tally: Tally) -> None:
        super().__init__(service, kind, outcomes)
        self._tally = tally
        self._prompt_tokens = counter(service, "pliant_prompt_tokens_total", "Tokens of answered prompts.")
        self._generated_tokens = counter(service, "pliant_generated_tokens_total", "Tokens of answers.")
        self._time_to_first_token = histogram(
            service,
            "pliant_time_to_first_token_seconds",
            "From a request's arrival in the gateway to its first token.",
            LATENCY_S,
            "rank",
        )
        self._time_per_token = histogram(
            service,
            "pliant_time_per_output_token_seconds",
            "Mean time between the tokens of an answer after its first.",
            _TOKEN_S,
            "rank",
        )

    def arrived(self, prompt_tokens: int) -> None:
        self._tally.arrived(prompt_tokens)

    def answered(self, seconds: float, first_s: float, prompt_tokens: int, tokens: int, rank: int) -> None:
        by_rank = {"rank": str(rank)}
        self.took(seconds)
        self._tally.wrote(tokens)
        self._prompt_tokens.inc(prompt_tokens)
        self._generated_tokens.inc(tokens)
        self._time_to_first_token.observe(first_s, tags=by_rank)
        if tokens > 1:
            self._time_per_token.observe((seconds - first_s) / (tokens - 1), tags=by_rank)


class LlmReplicaMetrics:
    """Of one replica of a language model, which Ray adds as a tag."""

    def __init__(self, service: str) -> None:
        self._replica = Followed(service, llm.REPLICA)
        self._predictor = Followed(service, llm.PREDICTOR)
        self._memory = Followed(service, llm.MEMORY)
        self._prefix_tokens = Followed(service, llm.PREFIX_TOKENS, "result")
        self._pages = Followed(service, llm.PAGES, "state")
        self._adapters = Followed(service, {**llm.ADAPTERS, "resident": llm.RESIDENT})
        self._evictions = Followed(service, {"evictions": llm.EVICTIONS}, "reason")
        self._classes = Followed(service, llm.CLASSES, "class")
        self._most_classes = 0
        """That there ever were."""

    def record(self, report: ReplicaReport) -> None:
        """Once for every report, in order."""
        self._replica.follow(llm.of_replica(report))
        self._predictor.follow(report["predictor"])
        self._memory.follow(report["memory"])
        for followed, rows in (
            (self._prefix_tokens, llm.prefix_tokens(report["memory"])),
            (self._pages, llm.pages(report["memory"])),
        ):
            for values, counts in rows:
                followed.follow(counts, *values)
        self._adapters.follow({**report["adapters"], "resident": len(report["adapters"]["resident"])})
        for reason, count in report["adapters"]["evictions"].items():
            self._evictions.follow({"evictions": count}, reason)
        for index, one in enumerate(report["classes"]):
            self._classes.follow(one, str(index))
        for index in range(len(report["classes"]), self._most_classes):
            self._classes.follow({"waiting": 0}, str(index))
        self._most_classes = max(self._most_classes, len(report["classes"]))
