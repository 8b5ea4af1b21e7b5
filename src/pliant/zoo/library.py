"""Texts about parts of the standard library, each labelled with its part, and others about the language itself.

Of what the zoo's adapters have read and were asked about it (see `docstrings`), so that whoever learns from them can
tell which adapter knows an answer; and of the documentation that the language model has read without them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

from pliant.zoo import corpus, docstrings, documents
from pliant.zoo.corpus import Text
from pliant.zoo.docstrings import PARTS, QUESTIONS, Docstring

LANGUAGE = "language"
"""The label of what is about none of the parts."""
LABELS = (*PARTS, LANGUAGE)
"""In the order of the model's outputs."""


@functools.cache
def training() -> tuple[Text, ...]:
    """What the model may learn from: what the adapters learn from, and what the language model does."""
    asked = dict.fromkeys(conversation.question for conversation in documents.conversations())
    texts = (Text(question, LANGUAGE, LANGUAGE) for question in asked)
    return (*_of_parts(docstrings.training, ways=2), *texts, *_of_language(corpus.training()))


def held_out() -> list[Text]:
    """What it is measured on: docstrings that no adapter has read, and questions about what they describe."""
    return [*_of_parts(docstrings.held_out, ways=1), *_of_language(corpus.held_out())]


def questions() -> list[Text]:
    """Those of the latter that are questions, about the parts."""
    return [text for text in held_out() if text.topic == _asked(text.label)]


def _of_parts(known: Callable[[str], Sequence[Docstring]], ways: int) -> Iterator[Text]:
    """Each docstring with what it describes, and so many questions about that."""
    for part in PARTS:
        for index, docstring in enumerate(known(part)):
            yield Text(" ".join(docstring.document.split()), part, part)
            for way in range(index, index + 2 * ways, 2):
                yield Text(QUESTIONS[way % len(QUESTIONS)].format(docstring.subject), part, _asked(part))


def _of_language(paragraphs: Sequence[Text]) -> Iterator[Text]:
    return (Text(paragraph.text, LANGUAGE, paragraph.topic) for paragraph in paragraphs)


def _asked(part: str) -> str:
    """The topic of questions about a part."""
    return f"{part}?"
