"""Forms that the zoo's language model learns to answer in: a JSON object about a statement, and the call of a tool.

They are few, and about Python's statements only, so that seconds of training do: enough to show structured output and
tools with a model that has learned to use them.
"""

import functools
import json
import re
from typing import NamedTuple

from pliant.zoo import documents
from pliant.zoo.shapes import ASSISTANT, SYSTEM, USER

TOOL = "look_up"
"""It takes a `topic`, such as "the for statement"."""


class Turn(NamedTuple):
    """What is said by one of `SYSTEM`, `USER` and `ASSISTANT`."""

    role: int
    text: str


TOOLS = Turn(SYSTEM, f"Tools: {TOOL}")
"""What the model is told of tools."""


Dialogue = tuple[Turn, ...]


@functools.cache
def dialogues() -> tuple[Dialogue, ...]:
    """For each statement: its JSON object, and the call that looks it up, with the tool's answer and ours."""
    found: list[Dialogue] = []
    for subject, meaning in _statements().items():
        described = json.dumps({"subject": subject, "meaning": meaning}, ensure_ascii=False)
        found.append((Turn(USER, f"Describe {subject} as JSON."), Turn(ASSISTANT, described)))
        call = json.dumps({"name": TOOL, "arguments": {"topic": subject}})
        found.append(
            (
                TOOLS,
                Turn(USER, f"Look up {subject}."),
                Turn(ASSISTANT, f"<tool_call>\n{call}\n</tool_call>"),
                Turn(SYSTEM, meaning),
                Turn(ASSISTANT, meaning),
            )
        )
    return tuple(found)


def _statements() -> dict[str, str]:
    """What is said of each, by what it is called in questions: the words are the same in answers, to be copied."""
    asked = {question.partition(" ")[2].removesuffix("."): answer for question, answer in documents.conversations()}
    return {subject: answer for subject, answer in asked.items() if re.fullmatch(r"the \w+ statement", subject)}
