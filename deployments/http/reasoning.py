"""Reasoning apart from the answer: models that think first write it between `<think>` and `</think>`.

Templates of some of them write the opening tag themselves, so that an answer begins within the thought.
"""

from __future__ import annotations

from typing import NamedTuple

_BEGIN, _END = "<think>", "</think>"
_SPACE = " \n\t\r"


def thinks(template: str) -> bool:
    """Whether a model thinks whose chat template this is."""
    return _END in template


def begun(prompt: str) -> bool:
    """Whether an answer to `prompt`, or to a text with this end, begins within a thought."""
    return prompt.rstrip().endswith(_BEGIN)


class Thought(NamedTuple):
    """What is new of an answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Tells the reasoning at the beginning of one answer and the rest apart, without tags and the space beside them."""

    def __init__(self, begun: bool) -> None:
        """`begun`: the answer begins within the thought."""
        self._within = begun
        self._over = False
        """Only content comes from here on."""
        self._bare = True
        """Nothing but space came since the last tag."""
        self._held = ""

    def push(self, text: str, ends: bool) -> Thought:
        """What is new with `text`; nothing comes after it if the answer `ends` with it."""
        self._held += text
        if not (self._within or self._over):
            self._begin(ends)
        reasoning = self._thought(ends) if self._within else ""
        return Thought(reasoning, self._rest() if self._over else "")

    def _begin(self, ends: bool) -> None:
        """Find out whether it thinks at all."""
        bare = self._held.lstrip(_SPACE)
        if bare.startswith(_BEGIN):
            self._within, self._held = True, bare.removeprefix(_BEGIN)
        elif ends or not _BEGIN.startswith(bare):
            self._over, self._bare = True, False

    def _thought(self, ends: bool) -> str:
        before, tag, behind = self._held.partition(_END)
        if self._bare:
            before = before.lstrip(_SPACE)
            self._bare = not before
        if tag:
            self._within, self._over, self._bare, self._held = False, True, True, behind
            return before.rstrip(_SPACE)
        kept = 0 if ends else undecided(before, _END)
        cut = len(before) - kept
        self._held = before[cut:]
        return before[:cut]

    def _rest(self) -> str:
        """All content that is there, without the space behind the thought."""
        content = self._held.lstrip(_SPACE) if self._bare else self._held
        self._bare, self._held = self._bare and not content, ""
        return content


def undecided(text: str, tag: str) -> int:
    """Characters at the end of `text` that may belong to `tag`: its beginning, and the space before it."""
    begun = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    bare = text[: len(text) - begun]
    return len(text) - len(bare.rstrip(_SPACE))
