"""Labelled data in a file of JSON lines, of which each mistake is told with its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pliant.errors import DataError

L = TypeVar("L", bound=BaseModel)


def read(data: str, line: type[L], form: str, advice: str) -> Iterator[tuple[int, L]]:
    """The lines of the file, each a `line`, with their numbers; empty ones are left out.

    Raises DataError that names the line if one is wrong, and says that each must be `form`; or that gives the `advice`
    where there is no such file.
    """
    try:
        lines = Path(data).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"{data}: cannot be read: {error.strerror}; {advice}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{data}: is not UTF-8: {error}") from None
    for number, text in enumerate(lines, 1):
        if text.strip():
            yield number, _parsed(data, number, text, line, form)


def _parsed(data: str, number: int, text: str, line: type[L], form: str) -> L:
    try:
        return line.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the line"
        raise DataError(f"{data}, line {number}: {where}: {problem['msg']}; each line must be {form}") from None
