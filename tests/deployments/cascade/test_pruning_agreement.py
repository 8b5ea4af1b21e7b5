"""Agreement is 1 for equal rankings, and compares words whatever the tokenizers."""

import numpy as np
import pytest

from pliant.deployments.cascade.pruning import Read, Words, find_words
from pliant.deployments.cascade.pruning_agreement import agreement


def reading(*importance: float) -> Read:
    text = " ".join(f"w{number}" for number in range(len(importance)))
    return (Words(text, find_words(text), np.array(importance)),)


def test_equal_rankings_agree_wholly() -> None:
    same = reading(1, 2, 3, 4), reading(0.1, 5, 6, 90)
    assert agreement([same, same]) == (1, pytest.approx(1), 2)


def test_opposite_rankings_share_only_the_middle() -> None:
    assert agreement([(reading(1, 2, 3, 4), reading(4, 3, 2, 1))]) == (0, pytest.approx(-1), 1)
    assert agreement([(reading(1, 2, 3), reading(3, 2, 1))]) == (0.5, pytest.approx(-1), 1)


def test_ties_share_their_mean_rank() -> None:
    one, other = reading(1, 2, 2, 4), reading(1, 3, 2, 4)
    assert agreement([(one, other)]).spearman == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 3, 2, 4])[0, 1])


def test_a_model_for_which_all_words_are_equal_says_nothing() -> None:
    assert agreement([(reading(1, 1, 1), reading(1, 2, 3))]).spearman == 0


def test_words_that_one_has_not_read_and_texts_of_one_word_do_not_count() -> None:
    pairs = [(reading(1, 2, np.inf), reading(1, 2, 0)), (reading(1), reading(1)), (reading(), reading())]
    assert agreement(pairs) == (1, pytest.approx(1), 1)


def test_top_half_is_weighed_by_words_and_chance_is_a_half() -> None:
    rng = np.random.default_rng(0)
    pairs = [(reading(*rng.random(20)), reading(*rng.random(20))) for _ in range(300)]
    assert agreement(pairs).top_half == pytest.approx(0.5, abs=0.03)
    assert agreement(pairs).spearman == pytest.approx(0, abs=0.03)
    mixed = [(reading(*range(8)), reading(*range(8))), (reading(1, 2), reading(2, 1))]
    assert agreement(mixed).top_half == pytest.approx(4 / 5)


def test_the_words_of_a_pair_are_ranked_together() -> None:
    one, other = (*reading(1, 5), *reading(2, 3)), (*reading(1, 9), *reading(2, 8))
    assert agreement([(one, other)]) == (1, pytest.approx(1), 1)
    with pytest.raises(ValueError, match="two different texts"):
        agreement([(one, reading(1, 5))])


def test_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="two different texts"):
        agreement([(reading(1, 2), reading(1, 2, 3))])
    with pytest.raises(ValueError, match="two words or more"):
        agreement([])
