"""The texts that the zoo's language model learns from: the Python documentation in `pydoc_data.topics`.

Unlike the classifiers' paragraphs (see `corpus`), documents keep their structure: a title, paragraphs in their order,
code and grammar with their indentation. Prose loses its line breaks and its marks (quotes around code, asterisks), so
that it reads as English. The titles and signatures in it become questions, what is below them the answers.
"""

import functools
import itertools
import re
from pydoc_data.topics import topics
from typing import NamedTuple

from pliant.zoo.corpus import bare_words

HELD_OUT = ("augassign", "callable-types", "context-managers", "conversions", "exprlists", "identifiers", "shifting")
"""The topics that the model never sees, nor their paragraphs where other topics repeat them."""

_WRAPPED_AT = 68
"""A line ends here at the latest; one that had room for the next line's first word was broken on purpose."""
_LONGEST_ANSWER = 120
_UNDERLINE = re.compile(r"^\s*([*=\-~^\"])\1{2,}$", re.MULTILINE)
_MARKS = re.compile(r'"("[^"\n]+"|[^"\n]+)"|\*(\w[^*\n]*)\*')
_SIGNATURE = re.compile(r"((?:\w+\.)+\w+)\(.*\)")
_OF_ALL = ("Explain {}.", "Tell me about {}.", "Describe {}.")
_OF_ONE = ("What is {}?", "What does {} do?")


class Conversation(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


@functools.cache
def documents() -> tuple[str, ...]:
    """One text for each topic, except those held out. What several topics say is left to the shortest of them."""
    return tuple("\n\n".join(found) for topic, found in _paragraphs_by_topic().items() if topic not in HELD_OUT)


@functools.cache
def held_out() -> tuple[str, ...]:
    """The texts that the model is measured on."""
    return tuple("\n\n".join(found) for topic, found in _paragraphs_by_topic().items() if topic in HELD_OUT)


@functools.cache
def conversations() -> tuple[Conversation, ...]:
    """Questions about topics, methods and functions that are not held out, each asked in several ways."""
    found: dict[Conversation, None] = {}
    for topic, (title, *paragraphs) in _paragraphs_by_topic().items():
        if topic in HELD_OUT:
            continue
        found |= dict.fromkeys(_asked(_subject(title), paragraphs[0]) if paragraphs else [])
        for signature, below in itertools.pairwise(paragraphs):
            if match := _SIGNATURE.fullmatch(signature.strip()):
                found |= dict.fromkeys(_asked(f"{match[1]}()", below))
    return tuple(found)


def _asked(subject: str, paragraph: str) -> list[Conversation]:
    """No conversation at all if the paragraph is no prose, or a long one."""
    answer = re.sub(":$", ".", paragraph.strip())
    if not answer.endswith(".") or "\n" in answer or len(answer.split()) > _LONGEST_ANSWER:
        return []
    questions = _OF_ALL + _OF_ONE if subject.startswith("the ") or subject.endswith("()") else _OF_ALL
    return [Conversation(question.format(subject), answer) for question in questions]


def _subject(title: str) -> str:
    """A title as it stands within a sentence."""
    return title.partition(" — ")[0].lower()


@functools.cache
def _paragraphs_by_topic() -> dict[str, list[str]]:
    """Topic -> its title and its paragraphs, of which none is in two topics. Those held out come first."""
    seen: set[str] = set()
    found = {}
    for topic in sorted(topics, key=lambda topic: (topic not in HELD_OUT, len(topics[topic]), topic)):
        title, *paragraphs = filter(str.strip, _UNDERLINE.sub("", topics[topic]).split("\n\n"))
        kept = [_plain(title)]
        for paragraph in paragraphs:
            if (words := bare_words(paragraph)) and words not in seen:
                seen.add(words)
                kept.append(_plain(paragraph))
        found[topic] = kept
    return found


def _plain(paragraph: str) -> str:
    """Prose on one line and without marks, at its indentation; code as it is."""
    lines = paragraph.strip("\n").rstrip().split("\n")
    if not _is_prose(lines):
        return "\n".join(lines)
    indentation = " " * (len(lines[0]) - len(lines[0].lstrip()))
    return indentation + _MARKS.sub(lambda match: match[1] or match[2], " ".join(" ".join(lines).split()))


def _is_prose(lines: list[str]) -> bool:
    if len(lines) == 1:
        return not lines[0].startswith(" ") or lines[0].endswith(".")
    return all(
        len(line) + 1 + len(following.split()[0]) >= _WRAPPED_AT and "::=" not in line
        for line, following in itertools.pairwise(lines)
    )
