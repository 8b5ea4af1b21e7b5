"""Cut-offs of exits, against trying them all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.exits import STEPS, choose_cut_off, stops


@given(st.integers(1, 3), st.integers(1, 30), st.integers(0, 1000), st.sampled_from([0.0, 0.01, 0.1, 0.5]))
def test_the_lowest_cut_off_from_which_on_the_accuracy_is_kept(exits: int, texts: int, seed: int, loss: float) -> None:
    rng = np.random.default_rng(seed)
    sure, right = rng.random((exits, texts)), rng.random((exits + 1, texts)) < 0.7

    def keeps(cut_off: float) -> bool:
        hits = 0
        for text in range(texts):
            first = next((exit_ for exit_ in range(exits) if sure[exit_, text] > cut_off), exits)
            assert stops(sure, cut_off)[text] == first
            hits += int(right[first, text])
        return hits / texts >= right[-1].mean() - loss - 1e-9

    chosen = choose_cut_off(sure, right, loss)
    tried = [step / STEPS for step in range(STEPS)]
    assert all(keeps(cut_off) for cut_off in tried if cut_off >= chosen)
    below = [cut_off for cut_off in tried if cut_off < chosen]
    assert not below or not keeps(below[-1])


def test_at_a_cut_off_of_1_none_leaves() -> None:
    assert stops(np.ones((2, 3)), 1.0).tolist() == [2, 2, 2]
