"""What replicas are asked for by one request: an answer for each choice of each prompt."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pliant.deployments.http.grammars import in_own_thread
from pliant.deployments.http.openai_schemas import GenerationRequest
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.request import Generation
from pliant.deployments.llm.served_models import ServedModel
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.sampling import Sampling

_MOST_ANSWERS = 64
"""Prompts times choices of one request."""
_MOST_SCORES = 2**20
"""Log probabilities of prompts in the answer to one request: about 64 MB."""


def bound(answers: int) -> None:
    """Raise RequestError for more answers than one request may have."""
    if answers > _MOST_ANSWERS:
        raise RequestError(
            Outcome.REJECTED, f"n: {answers} answers in one request; at most {_MOST_ANSWERS} are allowed", param="n"
        )


async def generations(
    served: ServedModel,
    call: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    wanted: int | None,
    logprobs: int | None,
    seed: int,
    grammar: str | None = None,
) -> list[Generation]:
    """In the order of OpenAI's choices. `seed` is for requests without one, and `grammar` for those that bind their
    answers to none themselves. Equal prompts have equal answers only if the request has a seed. Raises RequestError.
    """
    model = served.base
    _check_scores(call, sum(map(len, prompts)))
    if call.bound:
        grammar = await in_own_thread(call.grammar)
    words = model.bad_words(call.bad_words or ())
    banned = tuple((token, -math.inf) for token, *more in words if not more)
    sampling = _sampling(model, call, logprobs, banned)
    name = uuid.uuid4().hex
    return [
        Generation(
            id=f"{name}-{index}",
            prompt=prompt,
            max_tokens=_max_tokens(model, call, prompt, wanted),
            sampling=replace(sampling, seed=(seed + index if call.seed is None else call.seed + choice) % 2**64),
            stop=call.stops,
            ignore_eos=call.ignore_eos,
            adapter=served.registered and served.registered.adapter,
            stop_token_ids=tuple(call.stop_token_ids or ()),
            bad_words=tuple(word for word in words if len(word) > 1),
            grammar=grammar,
            prompt_logprobs=None if choice else call.prompt_alternatives,
        )
        for index, (prompt, choice) in enumerate(
            (prompt, choice) for prompt in prompts for choice in range(call.choices)
        )
    ]


def _check_scores(call: GenerationRequest, tokens: int) -> None:
    if call.prompt_alternatives is None:
        return
    scores = tokens * (1 + call.prompt_alternatives) * call.choices
    if scores > _MOST_SCORES:
        param = "logprobs" if call.prompt_logprobs is None else "prompt_logprobs"
        reason = f"{param}: {scores} log probabilities of prompts in one answer; at most {_MOST_SCORES} are allowed"
        raise RequestError(Outcome.REJECTED, f"{reason}: send fewer prompts or ask for fewer alternatives", param=param)


def _sampling(
    model: LanguageModel, call: GenerationRequest, logprobs: int | None, banned: tuple[tuple[int, float], ...]
) -> Sampling:
    """As asked for, and else as the model's folder says."""
    model.check_tokens([token for token, _ in call.biases], "logit_bias")
    model.check_tokens(call.stop_token_ids or (), "stop_token_ids")
    asked: dict[str, Any] = {
        "temperature": call.temperature,
        "top_k": None if call.top_k is None else max(0, call.top_k),
        "top_p": call.top_p,
        "min_p": call.min_p,
        "typical_p": call.typical_p,
        "presence_penalty": call.presence_penalty,
        "frequency_penalty": call.frequency_penalty,
        "repetition_penalty": call.repetition_penalty,
        "min_tokens": call.min_tokens,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(model.defaults, **given, logprobs=logprobs, logit_bias=(*call.biases, *banned))


def _max_tokens(model: LanguageModel, call: GenerationRequest, prompt: Sequence[int], wanted: int | None) -> int:
    most = model.tokens_for(prompt, wanted)
    if (least := call.min_tokens or 0) > most:
        reason = f"min_tokens: got {least}; the answer has {most} tokens at most"
        raise RequestError(Outcome.REJECTED, reason, param="min_tokens")
    return most
