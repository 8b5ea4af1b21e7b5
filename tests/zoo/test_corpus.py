"""The zoo's texts: labels, balance, and a held-out split that nothing leaks out of."""

import random
import re
from collections import Counter
from pydoc_data.topics import topics

from pliant.zoo import corpus


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def test_every_paragraph_is_there_once() -> None:
    seen = [words(text.text) for text in corpus.texts()]
    assert len(seen) == len(set(seen))
    assert len(seen) > 1500


def test_the_split_is_a_partition() -> None:
    training, held_out = corpus.training(), corpus.held_out()
    assert not {words(text.text) for text in training} & {words(text.text) for text in held_out}
    assert len(training) + len(held_out) == len(corpus.texts())
    assert 0.15 < len(held_out) / len(corpus.texts()) < 0.25


def test_no_window_of_training_paragraphs_holds_a_held_out_one() -> None:
    windows = corpus.windows(corpus.training(), 300, random.Random(0), (50, 400))
    held_out = [text.text for text in corpus.held_out() if len(words(text.text)) > 60]
    assert held_out
    assert not [text for window in windows for text in held_out if text in window.text]


def test_windows_follow_their_topic_and_reach_the_wanted_lengths() -> None:
    windows = corpus.windows(corpus.held_out(), 200, random.Random(0), (20, 300))
    assert windows == corpus.windows(corpus.held_out(), 200, random.Random(0), (20, 300))
    lengths = sorted(len(window.text.split()) for window in windows)
    assert lengths[-1] <= 300
    assert lengths[-20] > 150
    label_of = {text.topic: text.label for text in corpus.texts()}
    assert all(window.label == label_of[window.topic] for window in windows)


def test_topics_have_one_part_and_exist() -> None:
    named = [topic for names in corpus.PARTS.values() for topic in names.split()]
    assert len(named) == len(set(named))
    assert set(named) <= set(topics)


def test_labels_are_stable_and_balanced_enough() -> None:
    assert corpus.LABELS == (
        "data model",
        "compound statements",
        "simple statements",
        "expressions",
        "strings",
        "containers",
        "debugger",
    )
    for part in (corpus.training(), corpus.held_out()):
        shares = {label: count / len(part) for label, count in Counter(text.label for text in part).items()}
        assert set(shares) == set(corpus.LABELS)
        assert max(shares.values()) < 0.35
        assert min(shares.values()) > 0.05
