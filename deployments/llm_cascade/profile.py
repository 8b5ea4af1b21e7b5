"""What two language models make of labelled prompts, one way to ask each, and how that is kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pliant.cache import made_once
from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.deployments.serving.choosing import profiles
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.tenants import act_for, current
from pliant.errors import DataError
from pliant.policies.cascade.escalation import TOKENS, Answered
from pliant.training.labelled_prompts import FEWEST, LabelledPrompt

KEPT = "llm-cascades"
"""The folder of the cache with the profiles."""
_FILE = "profile.json"
FILES = (_FILE,)
"""Of a profile's folder."""
_RECIPE = 1
"""Rises when profiles made before are no good any more."""
_AT_ONCE = 8
"""Prompts that are under way."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Said(_Frozen):
    """What was made of one prompt."""

    small: str
    large: str
    logprobs: tuple[float, ...]
    """Of the first tokens of the small model's answer."""
    worse: bool
    """Whether that is not as good as the large one's."""
    large_tokens: int


class Profile(_Frozen):
    left_out: int
    """Prompts that a model does not take."""
    said: tuple[Said, ...]

    @property
    def answered(self) -> list[Answered]:
        return [Answered(one.logprobs, one.worse, one.large_tokens) for one in self.said]


async def profile(
    small: LanguageModel,
    large: LanguageModel,
    prompts: Sequence[LabelledPrompt],
    answer_tokens: int,
    progress: Callable[[str, float], object],
) -> Profile:
    """The likeliest answers of both to `prompts`, computed only while nobody waits for anything else.

    Raises DataError if too few of the prompts can be answered, and RequestError where a model fails.
    """
    act_for(current(), background=True)
    room = asyncio.Semaphore(_AT_ONCE)
    done = 0

    async def ask(prompt: LabelledPrompt) -> Said | None:
        nonlocal done
        async with room:
            found = await _said(small, large, prompt, answer_tokens)
        done += 1
        progress(f"{small.name} and {large.name} answer the labelled prompts", done / len(prompts))
        return found

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(prompt)) for prompt in prompts]
    except* RequestError as errors:
        raise errors.exceptions[0] from None
    said = [one for task in tasks if (one := task.result())]
    if len(said) < FEWEST:
        reason = f"{len(prompts) - len(said)} of {len(prompts)} prompts are not taken by a model"
        raise DataError(f"{reason}; at least {FEWEST} that both take are needed")
    return Profile(left_out=len(prompts) - len(said), said=tuple(said))


async def _said(small: LanguageModel, large: LanguageModel, prompt: LabelledPrompt, answer_tokens: int) -> Said | None:
    """None where one does not take the prompt."""
    try:
        first, second = [await _answer(model, prompt, answer_tokens) for model in (small, large)]
    except RequestError as error:
        if error.outcome is Outcome.REJECTED:
            return None
        raise
    if prompt.answer is None:
        worse = first.text != second.text
    else:
        worse = prompt.right(second.text) and not prompt.right(first.text)
    return Said(
        small=first.text,
        large=second.text,
        logprobs=tuple(row.logprob for row in (first.logprobs or ())[: max(TOKENS)]),
        worse=worse,
        large_tokens=len(second.tokens),
    )


async def _answer(model: LanguageModel, prompt: LabelledPrompt, tokens: int) -> Piece:
    if prompt.text is None:
        ids = await model.encode_chat(prompt.messages or ())
    else:
        ids = await model.encode(prompt.text)
    generation = Generation(
        id=uuid.uuid4().hex,
        prompt=ids,
        max_tokens=model.tokens_for(ids, max(1, min(tokens, model.max_length - len(ids)))),
        sampling=replace(model.defaults, temperature=0.0, logprobs=0),
    )
    async with aclosing(model.answer(generation)) as pieces:
        return merged([piece async for piece in pieces])


def folder_of(
    service: str, config: LlmCascadeConfig, fingerprints: Sequence[str], prompts: Sequence[LabelledPrompt]
) -> Path:
    """Where the profile lies, or will lie, of models with these fingerprints on these prompts."""
    whole = json.dumps([_RECIPE, config.answer_tokens, fingerprints, prompts])
    return profiles.folder_of(KEPT, service, hashlib.sha256(whole.encode()).hexdigest()[:16])


def load(folder: Path) -> Profile | None:
    """The profile in `folder`, if it is there and undamaged."""
    return profiles.load(folder, _read, (OSError, ValidationError))


def _read(folder: Path) -> Profile:
    return Profile.model_validate_json((folder / _FILE).read_bytes())


def keep(folder: Path, found: Profile) -> None:
    """Write `found` into `folder`, unless there is one already."""

    def write(into: Path) -> None:
        (into / _FILE).write_text(found.model_dump_json(indent=1))

    made_once(folder, write)
