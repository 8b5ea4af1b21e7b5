"""The language model's texts: structure kept, prose made plain, and nothing held out that leaks in."""

from pydoc_data.topics import topics

from pliant.zoo import documents
from pliant.zoo.corpus import bare_words


def paragraphs(texts: tuple[str, ...]) -> set[str]:
    return {words for text in texts for part in text.split("\n\n")[1:] if (words := bare_words(part))}


def test_documents_hold_what_the_documentation_holds_once() -> None:
    found = [words for text in documents.documents() for part in text.split("\n\n")[1:] if (words := bare_words(part))]
    assert len(found) == len(set(found))
    assert len(documents.documents()) == len(set(topics) - set(documents.HELD_OUT))
    assert sum(map(len, documents.documents())) > 250_000


def test_nothing_held_out_is_in_a_document_or_an_answer() -> None:
    held_out = paragraphs(documents.held_out())
    assert len(held_out) > 50
    assert not held_out & paragraphs(documents.documents())
    assert not held_out & {bare_words(answer) for _, answer in documents.conversations()}


def test_prose_is_plain_and_code_keeps_its_lines() -> None:
    (text,) = [text for text in documents.documents() if text.startswith("The for statement")]
    title, first, grammar, *_ = text.split("\n\n")
    assert title == "The for statement"
    assert first.startswith("The for statement is used to iterate over the elements of a sequence (such as a string,")
    assert "\n" not in first
    assert '::= "for" target_list "in"' in grammar
    assert "\n       print(i)\n" in text


def test_titles_and_signatures_become_questions() -> None:
    asked = dict(documents.conversations())
    assert asked["Explain the for statement."].startswith("The for statement is used to iterate over")
    assert asked["What does str.capitalize() do?"].startswith("Return a copy of the string")
    assert asked["Tell me about comparisons."].endswith(".")
    assert len(asked) == len(documents.conversations()) > 200
    assert not [answer for answer in asked.values() if "\n" in answer]
