"""Prompts with their answers, on which it is decided what a small language model may answer: a file of JSON lines."""

from __future__ import annotations

import random
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pliant.errors import DataError
from pliant.training import json_lines

FEWEST, MOST = 100, 2000
"""Prompts that are needed, and after which others are left out, as both models answer each."""
_FORM = '{"prompt": "…", "answer": "…"}, or messages instead of the prompt'


class LabelledPrompt(NamedTuple):
    """One of the two first is given."""

    text: str | None
    messages: tuple[dict[str, Any], ...] | None
    answer: str | None
    """What a right answer contains; None if nobody knows."""

    def right(self, answer: str) -> bool:
        """Whether `answer` contains the right one; upper and lower case, and how words are spaced, make no
        difference."""
        return _plain(self.answer or "") in _plain(answer)


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    answer: Annotated[str, Field(pattern=r"\S")] | None = None

    @model_validator(mode="after")
    def _one(self) -> _Line:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        return self


def read(data: str, seed: int = 0) -> list[LabelledPrompt]:
    """The prompts of the file, each once, MOST of them at most, at random by `seed`.

    Raises DataError that names the line if one is wrong, and if there are fewer than FEWEST.
    """
    given = [_prompt(line) for _, line in json_lines.read(data, _Line, _FORM, "name a file of JSON lines")]
    found = list({repr(one[:2]): one for one in given}.values())
    if len(found) < FEWEST:
        raise DataError(f"{data}: has {len(found)} different prompts; at least {FEWEST} are needed, better a thousand")
    known = sum(one.answer is not None for one in found)
    if known not in (0, len(found)):
        raise DataError(f"{data}: {known} of {len(found)} prompts have an answer; give all of them one, or none")
    return random.Random(seed).sample(found, min(len(found), MOST))


def _prompt(line: _Line) -> LabelledPrompt:
    return LabelledPrompt(line.prompt, tuple(line.messages) if line.messages else None, line.answer)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
