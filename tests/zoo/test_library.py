"""Texts by which the zoo learns which adapter knows an answer."""

from __future__ import annotations

from pliant.zoo import docstrings, library, shapes


def test_the_labels_are_the_parts_that_adapters_have_read_and_one_for_all_else() -> None:
    assert library.LABELS[:-1] == tuple(docstrings.PARTS)
    assert {shape.part for shape in shapes.ADAPTERS.values()} == {*library.LABELS} - {library.LANGUAGE}
    for texts in (library.training(), library.held_out()):
        assert {text.label for text in texts} == {*library.LABELS}


def test_nothing_that_is_held_out_is_learned_from() -> None:
    learned = {text.text for text in library.training()}
    asked = library.questions()
    documents = {text.text for text in library.held_out() if text not in asked}
    assert documents.isdisjoint(learned)
    subjects = {docstring.subject for part in docstrings.PARTS for docstring in docstrings.held_out(part)}
    assert len(asked) == sum(len(docstrings.held_out(part)) for part in docstrings.PARTS)
    assert all(any(subject in text.text for subject in subjects) for text in asked)
