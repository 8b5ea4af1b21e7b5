"""Models that mean different things by their classes are found out before they vote (Tabi §4.3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.label_agreement import LabelOrderError, check_agreement, columns


@given(st.permutations("abcde"))
def test_columns_put_logits_in_the_reference_order(labels: list[str]) -> None:
    assert [labels[column] for column in columns("abcde", labels)] == list("abcde")


def test_other_labels_are_named() -> None:
    with pytest.raises(LabelOrderError, match=r"only the one has \['good'\], only the other \['POS'\]"):
        columns(["bad", "POS"], ["good", "bad"])
    with pytest.raises(LabelOrderError, match="must differ"):
        columns(["a", "a"], ["a", "b"])


def answers(labels: Floats, accuracy: float, classes: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    given = np.where(random.random(len(labels)) < accuracy, labels, random.integers(classes, size=len(labels)))
    one_hot: Floats = np.eye(classes)[given.astype(np.int64)]
    return one_hot


@pytest.mark.parametrize(("classes", "texts"), [(2, 60), (3, 100), (20, 300), (150, 1000)])
def test_mixed_up_classes_are_refused_and_weak_models_are_not(classes: int, texts: int) -> None:
    labels = np.random.default_rng(0).integers(classes, size=texts).astype(np.float64)
    large = answers(labels, 0.95, classes, 1)
    for accuracy in (0.5, 0.75, 0.95):
        small = answers(labels, accuracy, classes, 2)
        share = check_agreement(small, large)
        assert share == (small.argmax(axis=1) == large.argmax(axis=1)).mean()
    with pytest.raises(LabelOrderError, match="if classes were renamed"):
        check_agreement(np.roll(small, 1, axis=1), large)


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 10])
def test_two_labels_swapped_are_refused(classes: int) -> None:
    for seed in range(20):
        labels = np.random.default_rng(seed).integers(classes, size=300).astype(np.float64)
        small, large = (
            answers(labels, accuracy, classes, 2 * seed + more) for more, accuracy in ((0, 0.85), (1, 0.95))
        )
        check_agreement(small, large)
        with pytest.raises(LabelOrderError, match=r"if classes were renamed \((0 to 1, 1 to 0|1 to 0, 0 to 1)\)"):
            check_agreement(small[:, [1, 0, *range(2, classes)]], large)


def test_weak_models_of_many_classes_are_not_refused() -> None:
    """45% right, and mostly so that it takes all classes of a group for one: no alarm in 300 sets of texts."""
    for seed in range(300):
        labels = np.random.default_rng(seed).integers(150, size=100).astype(np.float64)
        large = answers(labels, 0.95, 150, 3 * seed + 1)
        check_agreement(answers(labels, 0.45, 150, 3 * seed + 2), large)
        grouped = np.where(np.random.default_rng(seed).random(100) < 0.45, labels, labels // 5 * 5)
        check_agreement(answers(grouped, 0.95, 150, 3 * seed + 3), large)


@pytest.mark.parametrize("common", [0.5, 0.9])
def test_a_model_that_takes_common_classes_for_rare_ones_is_weak_only(common: float) -> None:
    """Of two classes it mostly calls the common one by the rare one's name, and knows the rare one."""
    random = np.random.default_rng(0)
    labels = np.where(random.random(2000) < common, 0, 1 + random.integers(4, size=2000))
    small = np.where((labels == 0) & (random.random(2000) < 0.6), 1, labels)
    assert check_agreement(np.eye(5)[small], np.eye(5)[labels]) == (small == labels).mean()


def test_a_model_that_says_one_thing_only_is_no_mix_up() -> None:
    large = np.eye(2)[[0] * 70 + [1] * 30]
    assert check_agreement(np.eye(2)[[0] * 100], large) == 0.7
    assert check_agreement(np.eye(2)[[1] * 100], large) == 0.3
    with pytest.raises(ValueError, match="same texts"):
        check_agreement(large, large[1:])
