"""Labelled prompts are read from a file, and each mistake in it is told with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pliant.errors import DataError
from pliant.training.labelled_prompts import FEWEST, MOST, LabelledPrompt, read


def written(folder: Path, lines: list[Any]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def lines(count: int = FEWEST) -> list[Any]:
    return [{"prompt": f"prompt {index}", "answer": f"answer {index}"} for index in range(count)]


def test_prompts_and_conversations_each_once(tmp_path: Path) -> None:
    said = {"messages": [{"role": "user", "content": "hello"}], "answer": "world", "more": 1}
    found = read(written(tmp_path, [*lines(), said, said, "", lines()[0]]))
    assert len(found) == FEWEST + 1
    [talk] = [one for one in found if one.messages]
    assert talk == LabelledPrompt(None, ({"role": "user", "content": "hello"},), "world")


def test_at_most_so_many_the_same_at_every_start(tmp_path: Path) -> None:
    data = written(tmp_path, lines(MOST + 500))
    found = read(data)
    assert len(found) == MOST
    assert found == read(data)


@pytest.mark.parametrize(
    ("answer", "right"), [("The  Answer\n2 it is", True), ("answer 12", False), ("an answer 2", True), ("", False)]
)
def test_an_answer_is_right_that_contains_the_right_one(answer: str, right: bool) -> None:
    assert LabelledPrompt("p", None, "answer 2").right(answer) is right


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 3: the line: Invalid JSON"),
        ({"answer": "a"}, "line 3: the line: Value error, needs either prompt or messages"),
        ({"prompt": "", "answer": "a"}, "line 3: prompt: String should have at least 1 character"),
        ({"prompt": "a", "answer": " "}, "line 3: answer: String should match pattern"),
        ({"messages": [], "answer": "a"}, "line 3: messages: List should have at least 1 item"),
        ({"prompt": "a", "messages": [{}], "answer": "a"}, "needs either prompt or messages"),
        ({"prompt": 7, "answer": "a"}, "line 3: prompt: Input should be a valid string"),
        ({"prompt": "new"}, f"{FEWEST} of {FEWEST + 1} prompts have an answer; give all of them one, or none"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, line: Any, told: str) -> None:
    given = lines()
    with pytest.raises(DataError) as error:
        read(written(tmp_path, [*given[:2], line, *given[2:]]))
    assert told in str(error.value)


def test_a_file_that_is_no_use(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"has 99 different prompts; at least {FEWEST} are needed"):
        read(written(tmp_path, [*lines(99), lines()[0]]))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read(str(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8"):
        read(str(tmp_path / "latin"))
