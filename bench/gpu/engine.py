"""Our engine, without Ray, against transformers' continuous batching: everything at once, and Poisson arrivals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pliant.bench.gpu import decoders
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale
from pliant.bench.llm.outcome import Outcome
from pliant.bench.llm.systems import System
from pliant.bench.llm.with_transformers import ContinuousBatching
from pliant.bench.llm.workload import Request, at_once, poisson, prompts, uniform_lengths
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.weights import RandomWeights
from pliant.torchvision_ops import declare

_MODEL = "1B"
"""transformers launches each operation by itself, which of the paper's models hides what a larger one would not."""
_LOADS = (0.3, 0.7)
"""Of what our engine answers when everything comes at once."""


def run(record: Record, scale: Scale) -> None:
    """Both answer the same requests; of theirs only whole answers are seen, so that it has no time to first token."""
    count, prompt, low, high = (4, 8, 2, 4) if scale.dry else (128, 512, 32, 256)
    vocab = decoders.shape(_MODEL, scale.dry).vocab
    requests = at_once(prompts(count, prompt, vocab, seed=0), uniform_lengths(count, low, high, seed=0))
    slots, longest = (2, 64) if scale.dry else (64, prompt + high)
    rate = 0.0
    with record.part("ours"):
        ours = _ours(scale, slots, longest)
        _answer(record, "first_requests", ours, requests[:slots])
        rate = _answer(record, "ours", ours, requests)
        for load in _LOADS:
            arriving = poisson(1 / (load * rate), requests, seed=1)
            _answer(record, f"ours_at_{load}", ours, arriving)
        del ours
    with record.part("transformers' continuous batching"):
        if scale.device.type == "cuda":
            torch.cuda.empty_cache()
        theirs = ContinuousBatching(_theirs(scale), slots * longest, slots)
        answered = _answer(record, "transformers", theirs, requests)
        if rate:
            record.figures["speedup_vs_transformers_continuous"] = rate / answered
            _answer(record, f"transformers_at_{_LOADS[0]}", theirs, poisson(1 / (_LOADS[0] * rate), requests, seed=1))


def _answer(record: Record, name: str, system: System, requests: list[Request]) -> float:
    """Requests per second that were answered; the rest goes into the record."""
    outcome = system.run(requests)
    record.tables[name] = _milliseconds(outcome, requests) | {"answered_per_s": len(requests) / outcome.total_s}
    record.save()
    return len(requests) / outcome.total_s


def _milliseconds(outcome: Outcome, requests: list[Request]) -> dict[str, Any]:
    """Medians and 99th percentiles; where answers come as a whole the first token is the last."""
    after_first = np.array([max(1, request.tokens - 1) for request in requests])
    kinds = {
        "to_first_token": outcome.to_first_token,
        "per_token": (outcome.last - outcome.first) / after_first,
        "latency": outcome.latencies,
    }
    return {
        f"{name}_ms": {f"p{q}": float(np.percentile(values, q)) * 1e3 for q in (50, 99)}
        for name, values in kinds.items()
    }


def _ours(scale: Scale, slots: int, longest: int) -> System:
    from pliant.bench.llm.ours import Fused  # wants pydantic

    shape = decoders.shape(_MODEL, scale.dry)
    vocabulary = {f"w{index}": index for index in range(shape.vocab)}
    loaded = executor.build(RandomWeights(shape, scale.dtype, scale.device), slots, longest)
    return Fused(loaded, Tokenizer(WordLevel(vocabulary, unk_token="w0")))


def _theirs(scale: Scale) -> Any:
    declare()
    from transformers import AutoConfig, AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    config = AutoConfig.for_model("llama", **decoders.config(_MODEL, scale.dry))
    with scale.device:
        model = models.from_config(config, dtype=scale.dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)
